#!/usr/bin/env python3
"""Runs the CUDA build's ppfsdp where it finds no GPU.

Each test names what would be wrong if it failed. On a machine with GPUs they are hidden, so that
the tests are the same there.
"""

import os
import re
import socket
import subprocess
import tempfile
import unittest

BINARY = os.path.abspath("src/cli/ppfsdp")
SETTINGS = {
    "training.steps": 4,
    "training.global_batch": 8,
    "model.dim": 16,
    "model.layers": 2,
    "model.heads": 2,
    "model.kv_heads": 1,
    "model.hidden": 32,
    "data.seq_len": 16,
}
# What the CPU build prints. Another CPU may add in another order: losses near 6 then differ in the
# sixth digit, which moves the fourth one printed behind the point by one at most.
LOSSES = [6.1219, 5.9526, 6.0188, 5.9042]
TOLERANCE = 1.5e-4


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class NoGpu(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        with open(os.path.join(self.folder, "text.txt"), "w") as file:
            file.write("".join("%d squared is %d.\n" % (i, i * i) for i in range(4000)))

    def run_binary(self, before, settings, **variables):
        """`ppfsdp BEFORE train --set ...`, without a GPU and without a launcher's variables."""
        command = [BINARY, *before, "train", "--set", "data.files=text.txt"]
        for setting in settings.items():
            command += ["--set", "%s=%s" % setting]
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": self.folder,
            "BUILD_WORKING_DIRECTORY": self.folder,
            "CUDA_VISIBLE_DEVICES": "",
            **variables,
        }
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=120
        )

    def check_losses(self, done):
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        losses = [float(loss) for loss in re.findall(r"step: +\d+  loss: +([\d.]+)", done.stdout)]
        self.assertEqual(len(losses), len(LOSSES), done.stdout)
        for got, expected in zip(losses, LOSSES):
            self.assertLess(abs(got - expected), TOLERANCE, done.stdout)

    def check_refusal(self, done):
        self.assertIn(done.returncode, (1, 2), done.stderr)
        self.assertEqual(done.stdout, "")
        self.assertRegex(done.stderr, r"\A[^\n]+\n\Z")
        self.assertIn("nccl", done.stderr.lower())

    # A binary for a cluster could not be tried where it was built: it would not start without
    # libcuda.so.1, or compute with other kernels.
    def test_sim_trains_as_in_the_cpu_build(self):
        self.check_losses(self.run_binary([], SETTINGS))

    def test_gloo_trains_as_in_the_cpu_build(self):
        self.check_losses(self.run_binary(["launch", "-n", "2", "--"], SETTINGS))

    # The user would see a stack of C++ frames, a crash, or nothing.
    def test_nccl_says_in_one_line_that_there_is_no_gpu(self):
        nccl = {**SETTINGS, "communication.backend": "nccl"}
        launched = {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        done = self.run_binary([], nccl, **launched)
        self.check_refusal(done)
        self.assertRegex(done.stderr, r"GPU|driver|device")

    # As many lines as ranks would say the same, or `launch` wait for ranks that are gone.
    def test_nccl_without_a_launcher_or_by_launch_is_one_line(self):
        for before in ([], ["launch", "-n", "2", "--"]):
            done = self.run_binary(before, {**SETTINGS, "communication.backend": "nccl"})
            self.check_refusal(done)
            self.assertRegex(done.stderr, r"GPU|driver|device")


if __name__ == "__main__":
    unittest.main()
