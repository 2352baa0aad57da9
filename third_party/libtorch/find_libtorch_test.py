#!/usr/bin/env python3
"""Each test names what would go wrong for a user if it failed. No test reaches the network."""

import collections
import errno
import os
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import zipfile
from unittest import mock

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import find_libtorch


def write(path, text=""):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(text)


def make_package(root, version=("2", "11")):
    """A folder with the outer form of LibTorch; its library is /bin/true, which ldd can read."""
    for name in find_libtorch.HEADERS:
        os.makedirs(os.path.join(root, "include", name), exist_ok=True)
    write(
        os.path.join(root, "include/torch/headeronly/version.h"),
        "#define TORCH_VERSION_MAJOR %s\n#define TORCH_VERSION_MINOR %s\n" % version,
    )
    os.makedirs(os.path.join(root, "lib"), exist_ok=True)
    write(os.path.join(root, "lib", "libc10.so"))
    os.symlink("/bin/true", os.path.join(root, "lib", "libtorch_cpu.so"))


def make_wheel(path):
    with zipfile.ZipFile(path, "w") as wheel:
        for name in find_libtorch.HEADERS:
            wheel.writestr("torch/include/%s/a.h" % name, "")
        wheel.writestr(
            "torch/include/torch/headeronly/version.h",
            "#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 11\n",
        )
        wheel.writestr("torch/include/fmt/core.h", "")
        wheel.writestr("torch/lib/libc10.so", "")
        wheel.writestr("torch/lib/libtorch_cuda.so", "")
        with open("/bin/true", "rb") as binary:
            wheel.writestr("torch/lib/libtorch_cpu.so", binary.read())


class FindLibtorch(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.home = folder.name
        self.root = os.path.join(self.home, ".cache/ppfsdp/libtorch-2.11.0")
        self.said = []
        environment = {"HOME": self.home, "PATH": os.environ["PATH"]}
        for patch in (
            mock.patch.dict(os.environ, environment, clear=True),
            mock.patch.object(find_libtorch, "installed_torch", lambda: None),
            mock.patch.object(find_libtorch, "download", self.download),
            mock.patch.object(find_libtorch.platform, "machine", lambda: "x86_64"),
        ):
            patch.start()
            self.addCleanup(patch.stop)
        self.downloads = 0

    def download(self, folder, wheels):
        self.downloads += 1
        make_wheel(os.path.join(folder, "torch.whl"))

    def find(self):
        return find_libtorch.find(self.said.append)

    def failure(self):
        with self.assertRaises(find_libtorch.Failure) as caught:
            self.find()
        self.assertNotIn("\n", str(caught.exception))
        return str(caught.exception)

    # Every clone would fetch 0.5 GB again, or other projects' headers would shadow Debian's.
    def test_fetches_once_and_only_what_is_needed(self):
        found = self.find()
        self.assertEqual(found, self.find())
        self.assertEqual(self.downloads, 1)
        self.assertEqual(found["headers"]["ATen"], self.root + "/include/ATen")
        self.assertEqual(found["libraries"]["libtorch_cpu.so"], self.root + "/lib/libtorch_cpu.so")
        self.assertEqual(sorted(os.listdir(self.root)), ["include", "lib"])
        self.assertEqual(sorted(os.listdir(self.root + "/include")), sorted(find_libtorch.HEADERS))
        self.assertNotIn("libtorch_cuda.so", os.listdir(self.root + "/lib"))

    # Two clones that build at once would both write into one folder.
    def test_two_at_once_fetch_once(self):
        started, go_on = threading.Event(), threading.Event()

        def slow_download(folder, wheels):
            started.set()
            go_on.wait()
            self.download(folder, wheels)

        def note_and_go_on(message):
            self.said.append(message)
            go_on.set()

        results = []
        with mock.patch.object(find_libtorch, "download", slow_download):
            first = threading.Thread(target=lambda: results.append(self.find()))
            first.start()
            started.wait()
            results.append(find_libtorch.find(note_and_go_on))
            first.join()
        self.assertEqual(self.downloads, 1)
        self.assertEqual(results[0], results[1])
        self.assertIn("Waiting for another process that fetches LibTorch", self.said)

    # What a killed fetch left behind would be built against.
    def test_a_half_finished_fetch_is_done_anew(self):
        write(self.root + ".partial/lib/libtorch_cpu.so", "half")
        write(self.root + "/lib/libtorch_cpu.so", "half")
        self.find()
        self.assertEqual(self.downloads, 1)
        self.assertFalse(os.path.exists(self.root + ".partial"))

    # A failed fetch would fill the disk, or be taken for whole by the next build.
    def test_a_failed_fetch_leaves_nothing(self):
        def fail(folder, wheels):
            write(os.path.join(folder, "torch.whl"), "not a zip file")

        with mock.patch.object(find_libtorch, "download", fail):
            self.assertIn("cannot be unpacked", self.failure())
        self.assertEqual(os.listdir(os.path.dirname(self.root)), ["libtorch-2.11.0.lock"])

    # The user's own choice would be passed over in silence.
    def test_a_wrong_libtorch_path_is_an_error(self):
        package = os.path.join(self.home, "given")
        os.environ["LIBTORCH_PATH"] = package
        self.assertIn("given is not a LibTorch", self.failure())
        make_package(package, ("2", "10"))
        self.assertIn("given is LibTorch 2.10; 2.11 is needed", self.failure())
        self.assertEqual(self.downloads, 0)

    # The user would look for a file that is there.
    def test_a_libtorch_that_may_not_be_read_is_said_to_be_so(self):
        os.environ["LIBTORCH_PATH"] = os.path.join(self.home, "given")
        refusal = PermissionError(errno.EACCES, "Permission denied", "version.h")
        with mock.patch.object(find_libtorch, "open", mock.Mock(side_effect=refusal), create=True):
            self.assertEqual(
                self.failure(), "LIBTORCH_PATH: version.h cannot be read: Permission denied"
            )

    # Bazel runs this in a folder of its own, where it would be looked for or fetched anew.
    def test_paths_must_be_absolute(self):
        os.environ["LIBTORCH_PATH"] = "given"
        self.assertEqual(self.failure(), "LIBTORCH_PATH: 'given' must be an absolute path")
        os.environ["LIBTORCH_PATH"] = ""
        os.environ["HOME"] = "home"
        self.assertEqual(self.failure(), "HOME: 'home' must be an absolute path")
        self.assertEqual(self.downloads, 0)

    # It would write into the folder where the next run fetches.
    def test_pip_ends_with_the_process_that_fetches(self):
        pip = os.path.join(self.home, "pip")
        script = "#!/bin/sh\necho $$ > {0}/new; mv {0}/new {0}/pid; exec sleep 60\n"
        write(pip, script.format(self.home))
        os.chmod(pip, 0o700)
        code = (
            "import find_libtorch; find_libtorch.python_with_pip = lambda: %r;"
            "find_libtorch.download(%r, find_libtorch.WHEELS)" % (pip, self.home)
        )
        fetching = subprocess.Popen([sys.executable, "-c", code], cwd=find_libtorch.HERE)
        try:
            while not os.path.exists(self.home + "/pid") and fetching.poll() is None:
                time.sleep(0.01)
        finally:
            fetching.kill()
            fetching.wait()
        with open(self.home + "/pid") as file:
            pid = int(file.read())
        deadline = time.monotonic() + 30
        while self.runs(pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.assertFalse(self.runs(pid))

    @staticmethod
    def runs(pid):
        """Whether the process has not ended; one that nobody waits for may stay as a zombie."""
        try:
            with open("/proc/%d/stat" % pid) as file:
                return file.read().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    def test_libtorch_path_comes_first(self):
        self.find()
        package = os.path.join(self.home, "given")
        make_package(package)
        os.environ["LIBTORCH_PATH"] = package
        self.assertEqual(self.find()["headers"]["c10"], package + "/include/c10")

    # The linker would fail later, with a message that does not name the cause.
    def test_a_library_that_cannot_be_loaded_is_an_error(self):
        package = os.path.join(self.home, "given")
        make_package(package)
        os.environ["LIBTORCH_PATH"] = package
        os.remove(package + "/lib/libtorch_cpu.so")
        write(package + "/lib/libtorch_cpu.so", "not a library")
        self.assertIn("libtorch_cpu.so cannot be loaded", self.failure())
        os.remove(package + "/lib/libtorch_cpu.so")
        self.assertIn("is not whole", self.failure())

    # Another version in the user's Python would stop the build, or be built against.
    def test_an_installed_torch_is_used_if_its_version_fits(self):
        package = os.path.join(self.home, "site-packages/torch")
        make_package(package, ("2", "9"))
        with mock.patch.object(find_libtorch, "installed_torch", lambda: package):
            self.assertEqual(self.find()["headers"]["c10"], self.root + "/include/c10")
            self.assertIn("is LibTorch 2.9; 2.11 is needed", self.said[0])
        other = os.path.join(self.home, "other/torch")
        make_package(other)
        find_libtorch.shutil.rmtree(self.root)
        with mock.patch.object(find_libtorch, "installed_torch", lambda: other):
            self.assertEqual(self.find()["headers"]["c10"], other + "/include/c10")
        self.assertEqual(self.downloads, 1)

    # The fetch would fail half-way, after minutes.
    def test_a_full_disk_is_an_error_before_the_fetch(self):
        usage = collections.namedtuple("usage", "free")(1 << 29)
        with mock.patch.object(find_libtorch.shutil, "disk_usage", lambda path: usage):
            self.assertIn("takes 2 GiB, 0.5 GiB are free", self.failure())
        self.assertEqual(self.downloads, 0)

    def test_a_home_that_is_not_there_or_not_writable_is_an_error(self):
        os.environ["HOME"] = ""
        self.assertIn("HOME is not set", self.failure())
        write(os.path.join(self.home, "file"))
        os.environ["HOME"] = os.path.join(self.home, "file")
        self.assertIn("Not a directory", self.failure())

    # Wheels for x86-64 would be linked on another machine.
    def test_another_machine_needs_libtorch_path(self):
        with mock.patch.object(find_libtorch.platform, "machine", lambda: "aarch64"):
            self.assertIn("this is aarch64: set LIBTORCH_PATH", self.failure())

    def test_reasons_are_one_line_that_names_the_cause(self):
        retrying = "WARNING: Retrying after connection broken by '%s': /simple/torch/\n"
        refused = "NewConnectionError('Failed to establish a new connection: [Errno -3] No name')"
        refused = retrying % refused + "ERROR: No matching distribution found for torch==2.11.0\n"
        self.assertEqual(find_libtorch.reason_of(refused), "no network: No name")
        untrusted = "SSLError(1, '[SSL: CERTIFICATE_VERIFY_FAILED] self-signed (_ssl.c:992)')"
        self.assertEqual(find_libtorch.reason_of(retrying % untrusted), "no network: self-signed")
        slow = 'ReadTimeoutError("Read timed out.")'
        self.assertEqual(find_libtorch.reason_of(retrying % slow), "no network: " + slow)
        full = "ERROR: Could not install packages: [Errno 28] No space left on device\n"
        self.assertEqual(find_libtorch.reason_of(full), "no space left on device")
        self.assertIn(
            "SHA-256",
            find_libtorch.reason_of("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM ...\n"),
        )
        self.assertEqual(find_libtorch.reason_of("WARNING: a\nERROR: b\n"), "ERROR: b")
        self.assertEqual(find_libtorch.reason_of(""), "no reason given")

    # The user would see a traceback.
    def test_main_turns_every_fault_into_one_line(self):
        for fault, line in (
            (find_libtorch.Failure("why"), "LibTorch: why"),
            (OSError(errno.ENOSPC, "No space"), "LibTorch: no space left on device"),
            (KeyboardInterrupt(), "LibTorch: interrupted"),
        ):
            with mock.patch.object(find_libtorch, "find", mock.Mock(side_effect=fault)):
                with self.assertRaises(SystemExit) as caught:
                    find_libtorch.main()
            self.assertEqual(caught.exception.code, line)

    # pip would take whatever the index serves under that name.
    def test_every_wheel_is_pinned_by_its_hash(self):
        with open(find_libtorch.WHEELS) as file:
            wheels = [line for line in file.read().split("\n") if line and not line.startswith("#")]
        self.assertEqual(len(wheels), 3)
        for wheel in wheels:
            self.assertRegex(wheel, r"^[a-z-]+==[\d.]+ --hash=sha256:[0-9a-f]{64}$")
        self.assertTrue(
            any(wheel.startswith("torch==%s " % find_libtorch.VERSION) for wheel in wheels)
        )


if __name__ == "__main__":
    unittest.main()
