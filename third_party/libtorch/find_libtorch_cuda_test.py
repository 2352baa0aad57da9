#!/usr/bin/env python3
"""Each test names what would go wrong for a user if it failed. No test reaches the network.

The libraries are made by gcc: the loader resolves them as it does the real ones.
"""

import collections
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import unittest
import zipfile
from unittest import mock

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import find_libtorch
import find_libtorch_cuda
from find_libtorch_cuda import PARTS

CUDA_HEADERS = [name for part in PARTS for name in part.headers if name != "nccl.h"]
TORCH = PARTS[0].libraries


def write(path, text=""):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(text)


def compiled(folder, name, needs=(), text=""):
    """Makes a shared library that needs `needs`, files in `folder`, and holds `text`."""
    path = os.path.join(folder, name)
    source = 'const char text_%s[] = "%s";' % (re.sub(r"\W", "_", name), text)
    command = ["gcc", "-shared", "-nostdlib", "-fPIC", "-Wl,--no-as-needed", "-Wl,-soname," + name]
    command += ["-Wl,-rpath,$ORIGIN", "-o", path, "-x", "c", "-", "-x", "none"]
    command += [os.path.join(folder, need) for need in needs]
    subprocess.run(command, input=source, text=True, check=True)


def make_headers(folder, cuda=13000, names=CUDA_HEADERS):
    for name in names:
        text = "#define CUDA_VERSION %d\n" % cuda if name == "cuda.h" else ""
        write(os.path.join(folder, name), text)


def make_nccl_header(folder, version=(2, 28, 9)):
    text = "#define NCCL_MAJOR %d\n#define NCCL_MINOR %d\n#define NCCL_PATCH %d\n" % version
    write(os.path.join(folder, "nccl.h"), text)


class FindLibtorchCuda(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.made = folder.name
        for part in PARTS[1:]:
            for name in part.libraries:
                compiled(cls.made, name, text="NCCL version 2.28.9+cuda13.0")
        compiled(cls.made, "libcudart.so.13")
        compiled(cls.made, "libc10.so")
        compiled(cls.made, "libtorch_cpu.so", ["libc10.so", "libcudart.so.13"])
        compiled(cls.made, "libtorch_nvshmem.so")
        compiled(cls.made, "libc10_cuda.so", ["libc10.so", "libcudart.so.13"])
        needs = ["libtorch_cpu.so", "libc10_cuda.so", "libtorch_nvshmem.so", "libcudart.so.13"]
        compiled(cls.made, TORCH[0], needs + ["libcublas.so.13", "libnccl.so.2"])
        compiled(cls.made, TORCH[1], [TORCH[0], "libcusolver.so.12"])

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.home = os.path.realpath(folder.name)
        self.cache = os.path.join(self.home, ".cache/ppfsdp")
        self.linked = os.path.join(self.cache, "libtorch-2.11.0")
        self.root = os.path.join(self.cache, "libtorch-2.11.0-cuda")
        self.tools = os.path.join(self.home, "cuda")
        self.installed = None
        self.said, self.fetched = [], []
        self.make_libtorch(self.linked)
        environment = {"HOME": self.home, "PATH": os.environ["PATH"]}
        for patch in (
            mock.patch.dict(os.environ, environment, clear=True),
            mock.patch.object(find_libtorch, "installed_torch", lambda: self.installed),
            mock.patch.object(find_libtorch, "download", self.download),
            mock.patch.object(find_libtorch.platform, "machine", lambda: "x86_64"),
            mock.patch.object(find_libtorch_cuda, "TOOLKIT", self.tools),
            mock.patch.object(find_libtorch_cuda, "SYSTEM_HEADERS", []),
            mock.patch.object(find_libtorch_cuda, "SYSTEM_LIBRARIES", []),
            mock.patch.object(sys, "argv", ["find_libtorch_cuda.py"]),
        ):
            patch.start()
            self.addCleanup(patch.stop)

    def put(self, folder, names):
        os.makedirs(folder, exist_ok=True)
        for name in names:
            shutil.copy(os.path.join(self.made, name), folder)

    def make_libtorch(self, root, cuda=False):
        """A LibTorch in `root`, with or without its CUDA part."""
        for name in find_libtorch.HEADERS:
            os.makedirs(os.path.join(root, "include", name), exist_ok=True)
        write(
            os.path.join(root, "include/torch/headeronly/version.h"),
            "#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 11\n",
        )
        self.put(os.path.join(root, "lib"), ["libc10.so", "libtorch_cpu.so", "libcudart.so.13"])
        if cuda:
            self.put(os.path.join(root, "lib"), TORCH)

    def make_python_torch(self):
        """What pip installs for torch: CUDA's headers are among it, except for a few."""
        self.installed = os.path.join(self.home, "site-packages/torch")
        nvidia = os.path.join(self.home, "site-packages/nvidia")
        self.make_libtorch(self.installed, cuda=True)
        for part in PARTS[1:]:
            self.put(os.path.join(nvidia, self.package(part), "lib"), part.libraries)
        make_headers(os.path.join(nvidia, "cu13/include"), names=PARTS[1].headers)
        make_nccl_header(os.path.join(nvidia, "nccl/include"))

    def make_toolkit(self, cuda=13000, libraries=("libcublas.so.13", "libcublasLt.so.13")):
        make_headers(os.path.join(self.tools, "include"), cuda)
        self.put(os.path.join(self.tools, "lib64"), ["libcudart.so.13", *libraries])

    def package(self, part):
        return "nccl" if part.wheel == "nvidia-nccl-cu13" else "cu13"

    def download(self, folder, wheels):
        """As pip does for the one wheel that `wheels` lists."""
        with open(wheels) as file:
            (line,) = file.read().strip().split("\n")
        self.assertRegex(line, r"^[\w-]+==[\d.]+ --hash=sha256:[0-9a-f]{64}$")
        (part,) = [part for part in PARTS if line.startswith(part.wheel + "==")]
        # The wheel before it was removed, or the disk would have to hold all of them.
        self.assertEqual(os.listdir(folder), [])
        self.fetched.append(part.wheel)
        lib = "torch/lib/" if part is PARTS[0] else "nvidia/%s/lib/" % self.package(part)
        include = "nvidia/%s/include/" % self.package(part)
        headers = os.path.join(self.home, "headers")
        make_headers(headers)
        make_nccl_header(headers)
        with zipfile.ZipFile(os.path.join(folder, part.wheel + ".whl"), "w") as wheel:
            for name in part.libraries:
                wheel.write(os.path.join(self.made, name), lib + name)
            for name in part.headers:
                wheel.write(os.path.join(headers, name), include + name)
            wheel.writestr(lib + "libnvrtc.alt.so.13", "")
            wheel.writestr(include + "cccl/thrust/sort.h", "")
            wheel.writestr("torch/include/ATen/Tensor.h", "")

    def find(self):
        return find_libtorch_cuda.find(self.said.append)

    def failure(self):
        with self.assertRaises(find_libtorch.Failure) as caught:
            self.find()
        self.assertNotIn("\n", str(caught.exception))
        return str(caught.exception)

    def given(self):
        """A LibTorch with CUDA in $LIBTORCH_PATH, with the nvidia packages beside it."""
        self.make_python_torch()
        os.environ["LIBTORCH_PATH"] = self.installed
        self.nvidia = os.path.join(self.home, "site-packages/nvidia")

    # A machine without CUDA's software could not compile and link; or each clone would fetch again.
    def test_all_is_fetched_once_where_there_is_nothing(self):
        found = self.find()
        self.assertEqual(self.fetched, [part.wheel for part in PARTS])
        self.assertEqual(found, self.find())
        self.assertEqual(len(self.fetched), len(PARTS))
        self.assertEqual(sorted(os.listdir(self.root)), ["include", "lib"])
        self.assertNotIn("libnvrtc.alt.so.13", os.listdir(self.root + "/lib"))
        self.assertEqual(
            sorted(os.listdir(self.root + "/include")),
            sorted([*PARTS[1].headers, "crt", "nv", "nccl.h"]),
        )
        self.assertEqual(found["library_folders"], [self.root + "/lib"])
        self.assertEqual(found["nccl_headers"], {"nccl.h": self.root + "/include/nccl.h"})
        self.assertEqual(found["cuda_headers"]["crt"], self.root + "/include/crt")
        self.assertEqual(found["cuda_headers"]["cuda.h"], self.root + "/include/cuda.h")
        self.assertNotIn("nccl.h", found["cuda_headers"])

    # libtorch_cuda.so would be loaded with a second libtorch_cpu.so, or libcudart be linked twice.
    def test_what_the_cpu_part_has_is_linked_from_there(self):
        self.assertEqual(
            self.find()["libraries"],
            sorted([*TORCH, "libcublas.so.13", "libcusolver.so.12", "libnccl.so.2"]),
        )

    # Gigabytes would be fetched that the machine has.
    def test_what_the_toolkit_has_is_not_fetched(self):
        self.make_toolkit()
        found = self.find()
        absent = ("nvidia-cublas", "nvidia-cuda-runtime", "nvidia-cuda-crt", "nvidia-cuda-cccl")
        self.assertEqual(self.fetched, [p.wheel for p in PARTS if p.wheel not in absent])
        self.assertIn(self.tools + "/lib64", found["library_folders"])
        self.assertEqual(found["cuda_headers"]["nv"], self.tools + "/include/nv")
        # And what it no longer has is fetched then.
        shutil.rmtree(self.tools)
        self.fetched.clear()
        self.assertEqual(self.find()["library_folders"], [self.root + "/lib"])
        self.assertEqual(len(self.fetched), len(PARTS))

    def test_cuda_home_comes_before_the_usual_place(self):
        self.make_toolkit()
        os.rename(self.tools, os.path.join(self.home, "other"))
        os.environ["CUDA_HOME"] = os.path.join(self.home, "other")
        self.assertEqual(self.find()["cuda_headers"]["nv"], self.home + "/other/include/nv")

    # The user's own choice would be passed over in silence.
    def test_a_wrong_cuda_home_is_an_error(self):
        os.environ["CUDA_HOME"] = self.home
        self.assertIn("CUDA_HOME: %s is not a CUDA toolkit 13" % self.home, self.failure())
        self.assertEqual(self.fetched, [])

    # Libraries of another CUDA bear the same names, and its headers declare other structs.
    def test_a_toolkit_of_another_major_version_is_not_used(self):
        self.make_toolkit(cuda=12040)
        self.assertEqual(self.find()["library_folders"], [self.root + "/lib"])
        self.assertEqual(self.said[1:], [])
        os.environ["CUDA_HOME"] = self.tools
        self.find()
        self.assertIn("%s/include is CUDA 12.4, and 13 is needed" % self.tools, self.said[1])
        self.given()
        self.assertIn("(%s/include is CUDA 12.4); set CUDA_HOME" % self.tools, self.failure())

    # Another NCCL would be linked that lacks the functions which the backend calls.
    def test_an_old_nccl_in_the_toolkit_is_not_used(self):
        self.make_toolkit()
        make_nccl_header(self.tools + "/include", (2, 27, 7))
        compiled(self.tools + "/lib64", "libnccl.so.2", text="NCCL version 2.27.7+cuda13.0")
        found = self.find()
        self.assertIn("nvidia-nccl-cu13", self.fetched)
        self.assertEqual(found["nccl_headers"], {"nccl.h": self.root + "/include/nccl.h"})
        self.assertEqual(found["library_folders"][0], self.root + "/lib")

    # The same torch would be fetched though it is installed.
    def test_an_installed_torch_is_used_if_it_is_the_linked_one(self):
        self.make_python_torch()
        found = self.find()
        self.assertEqual(self.fetched, ["nvidia-cuda-crt", "nvidia-cuda-cccl"])
        self.assertEqual(found["library_folders"][0], self.installed + "/lib")
        self.assertEqual(found["cuda_headers"]["crt"], self.root + "/include/crt")
        self.assertIn("/nvidia/cu13/include/cuda.h", found["cuda_headers"]["cuda.h"])
        # With a toolkit, all headers are of one release.
        self.make_toolkit()
        self.assertEqual(self.find()["cuda_headers"]["cuda.h"], self.tools + "/include/cuda.h")

    # Two LibTorches would be loaded into one process.
    def test_an_installed_torch_is_not_used_if_it_is_another(self):
        self.make_python_torch()
        with open(self.installed + "/lib/libtorch_cpu.so", "ab") as file:
            file.write(b"\0")
        self.assertEqual(self.find()["library_folders"], [self.root + "/lib"])
        self.assertIn("%s is not the LibTorch that is linked" % self.installed, self.said[0])

    def test_an_installed_torch_without_cuda_is_not_used(self):
        self.installed = os.path.join(self.home, "site-packages/torch")
        self.make_libtorch(self.installed)
        self.assertEqual(self.find()["library_folders"], [self.root + "/lib"])
        self.assertIn("%s has no CUDA" % self.installed, self.said[0])
        # When it is what the CPU build links, no wheel fits it.
        shutil.rmtree(self.linked)
        self.assertIn("which the build links, is a LibTorch without CUDA: set", self.failure())

    # The build would link one LibTorch and its CUDA part be another's.
    def test_the_linked_libtorch_can_be_named(self):
        self.make_python_torch()
        make_headers(os.path.join(self.home, "site-packages/nvidia/cu13/include"))
        library = self.installed + "/lib/libtorch_cpu.so"
        with open(library, "ab") as file:
            file.write(b"\0")
        os.symlink(library, os.path.join(self.home, "libtorch_cpu.so"))
        arguments = ["find_libtorch_cuda.py", "FILE", os.path.join(self.home, "libtorch_cpu.so")]
        with mock.patch.object(sys, "argv", arguments):
            self.assertEqual(self.find()["library_folders"][0], self.installed + "/lib")
        self.assertEqual(self.fetched, [])

    def test_libtorch_path_is_used_as_it_is(self):
        self.given()
        self.make_toolkit()
        found = self.find()
        self.assertEqual(found["library_folders"][0], self.installed + "/lib")
        self.assertNotIn(self.tools + "/lib64", found["library_folders"])
        self.assertEqual(self.fetched, [])

    # The user's own choice would be passed over in silence.
    def test_libtorch_path_without_cuda_is_an_error(self):
        os.environ["LIBTORCH_PATH"] = self.linked
        self.assertIn("PATH: it is a LibTorch without CUDA: " + self.linked, self.failure())
        self.assertEqual(self.fetched, [])

    # The compiler would name a header that the user has never heard of, and no remedy.
    def test_missing_headers_are_an_error(self):
        self.given()
        where = self.nvidia + "/cu13/include"
        self.assertIn("no header crt/host_defines.h in %s, " % where, self.failure())
        self.assertIn("; set CUDA_HOME to a CUDA toolkit 13", self.failure())
        self.make_toolkit()
        os.remove(self.nvidia + "/nccl/include/nccl.h")
        self.assertIn("no header nccl.h in ", self.failure())
        make_nccl_header(self.tools + "/include", (2, 27, 7))
        self.assertIn("include/nccl.h is NCCL 2.27.7); install NCCL 2.28 or later", self.failure())
        system = os.path.join(self.home, "usr/include")
        make_nccl_header(system)
        with mock.patch.object(find_libtorch_cuda, "SYSTEM_HEADERS", [system]):
            self.assertEqual(self.find()["nccl_headers"], {"nccl.h": system + "/nccl.h"})
        self.assertEqual(self.fetched, [])

    # The program would end at its first NCCL call, or with a crash.
    def test_an_nccl_that_does_not_fit_is_an_error(self):
        self.given()
        self.make_toolkit()
        make_nccl_header(self.nvidia + "/nccl/include", (2, 29, 1))
        self.assertIn("declares NCCL 2.29.1, but %s/nccl/lib" % self.nvidia, self.failure())
        compiled(self.nvidia + "/nccl/lib", "libnccl.so.2", text="NCCL version 2.27.7+cuda13.0")
        self.assertIn("libnccl.so.2 is NCCL 2.27.7; 2.28 or later is needed", self.failure())
        compiled(self.nvidia + "/nccl/lib", "libnccl.so.2")
        self.assertIn("libnccl.so.2 is NCCL of an unknown version", self.failure())

    # LibTorch's archives have NCCL inside libtorch_cuda.so: the backend needs one to call.
    def test_nccl_may_lie_elsewhere(self):
        self.given()
        self.make_toolkit()
        lib = self.installed + "/lib"
        self.put(lib, ["libcublas.so.13", "libcublasLt.so.13"])
        needs = ["libtorch_cpu.so", "libc10_cuda.so", "libcudart.so.13", "libcublas.so.13"]
        compiled(lib, TORCH[0], needs)
        shutil.rmtree(self.nvidia + "/nccl/lib")
        self.assertIn("install NCCL 2.28 or later", self.failure())
        system = os.path.join(self.home, "usr/lib")
        self.put(system, ["libnccl.so.2"])
        with mock.patch.object(find_libtorch_cuda, "SYSTEM_LIBRARIES", [system]):
            found = self.find()
        self.assertIn("libnccl.so.2", found["libraries"])
        self.assertIn(system, found["library_folders"])

    # The linker would fail later, with a message that does not name the cause.
    def test_a_library_that_cannot_be_loaded_is_an_error(self):
        self.given()
        self.make_toolkit()
        lib = self.installed + "/lib"
        self.put(lib, ["libcudart.so.13"])
        compiled(lib, "libabsent.so")
        compiled(lib, TORCH[0], ["libcudart.so.13", "libabsent.so"])
        os.remove(lib + "/libabsent.so")
        self.assertIn("cannot be loaded: libabsent.so => not found", self.failure())
        # Another release of the same name, which lacks what LibTorch calls.
        command = ["gcc", "-shared", "-nostdlib", "-fPIC", "-o", lib + "/" + TORCH[0]]
        command += ["-x", "c", "-", "-x", "none", "-Wl,--no-as-needed", lib + "/libcudart.so.13"]
        source = "int cudaNew(void); int call(void) { return cudaNew(); }"
        subprocess.run(command, input=source, text=True, check=True)
        self.assertIn("cannot be loaded: undefined symbol: cudaNew", self.failure())
        write(self.installed + "/lib/" + TORCH[0], "not a library")
        self.assertIn("needs no libcudart.so", self.failure())

    # The linker would take the folder's name for several options.
    def test_a_folder_that_cannot_be_named_to_the_linker_is_an_error(self):
        self.given()
        self.make_toolkit()
        os.rename(os.path.join(self.home, "site-packages"), os.path.join(self.home, "a,b"))
        os.environ["LIBTORCH_PATH"] = os.path.join(self.home, "a,b/torch")
        self.assertIn("its name has a space or a separator", self.failure())

    # What a failed fetch left would be linked, or fill the disk.
    def test_a_failed_fetch_leaves_nothing(self):
        def third_fails(folder, wheels):
            if len(self.fetched) == 2:
                raise find_libtorch.Failure("no network")
            self.download(folder, wheels)

        with mock.patch.object(find_libtorch, "download", third_fails):
            self.assertEqual(self.failure(), "no network")
        linked, whole, lock = "libtorch-2.11.0", "libtorch-2.11.0-cuda", "libtorch-2.11.0-cuda.lock"
        self.assertEqual(sorted(os.listdir(self.cache)), [linked, lock])
        write(self.root + ".partial/lib/libtorch_cuda.so", "half")
        write(self.root + "/lib/libtorch_cuda.so", "half")
        self.assertEqual(self.find()["library_folders"], [self.root + "/lib"])
        self.assertEqual(sorted(os.listdir(self.cache)), [linked, whole, lock])

    def test_a_wheel_without_a_needed_file_is_an_error(self):
        def empty(folder, wheels):
            zipfile.ZipFile(os.path.join(folder, "torch.whl"), "w").close()

        with mock.patch.object(find_libtorch, "download", empty):
            self.assertIn("the wheel of torch lacks a file that is needed", self.failure())

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
            results.append(find_libtorch_cuda.find(note_and_go_on))
            first.join()
        self.assertEqual(len(self.fetched), len(PARTS))
        self.assertEqual(results[0], results[1])

    # The fetch would fail half-way, after minutes.
    def test_a_full_disk_is_an_error_before_the_fetch(self):
        usage = collections.namedtuple("usage", "free")(1 << 30)
        with mock.patch.object(find_libtorch.shutil, "disk_usage", lambda path: usage):
            self.assertIn("takes 5 GiB, 1.0 GiB are free", self.failure())
        self.assertEqual(self.fetched, [])

    # pip would take whatever the index serves under that name, or two LibTorches be linked.
    def test_every_wheel_is_pinned_and_torch_is_the_cpu_parts(self):
        with open(find_libtorch_cuda.WHEELS) as file:
            lines = [line for line in file.read().split("\n") if line and not line.startswith("#")]
        for line in lines:
            self.assertRegex(line, r"^[\w-]+==[\d.]+ --hash=sha256:[0-9a-f]{64}$")
        self.assertEqual([line.split("==")[0] for line in lines], [part.wheel for part in PARTS])
        with open(find_libtorch.WHEELS) as file:
            linked = file.read().split("\n")
        for wheel in ("torch==", "nvidia-cuda-runtime=="):
            (line,) = [line for line in lines if line.startswith(wheel)]
            self.assertIn(line, linked)

    # The user would see a traceback, or take it for a fault of the CPU build.
    def test_an_error_is_one_line_that_says_with_cuda(self):
        os.environ["LIBTORCH_PATH"] = self.linked
        with self.assertRaises(SystemExit) as caught:
            find_libtorch.run(find_libtorch_cuda.find, "LibTorch with CUDA")
        self.assertTrue(caught.exception.code.startswith("LibTorch with CUDA: LIBTORCH_PATH: "))


if __name__ == "__main__":
    unittest.main()
