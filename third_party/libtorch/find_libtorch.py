"""Prints a folder whose include/ and lib/ hold what ppFSDP needs of LibTorch 2.11.0.

Looked for in this order: $LIBTORCH_PATH (an unpacked LibTorch, or a Python torch package folder), an
installed Python torch 2.11, and pip's wheels of it, of which only the needed parts are unpacked, once,
into ~/.cache/ppfsdp. Errors are one line on standard error and exit code 1.
"""
import glob
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile

VERSION = "2.11.0"
WHEELS = ["torch==" + VERSION, "nvidia-cuda-runtime==13.0.96", "nvidia-cuda-cupti==13.0.85"]
# include/ carries other projects' headers too (fmt, protobuf, pybind11) that would shadow Debian's.
HEADERS = ["ATen", "c10", "caffe2", "torch"]
LIBRARIES = ["libtorch_cpu.so", "libc10.so", "libgomp.so.1", "libgomp-*.so*", "libcudart.so.13", "libcupti.so.13"]
FREE_BYTES = 3 << 30
CACHE = os.path.join(os.path.expanduser("~"), ".cache", "ppfsdp")


def fail(message):
    sys.stderr.write(message + "\n")
    sys.exit(1)


def is_libtorch(path):
    version = os.path.join(path, "include", "torch", "headeronly", "version.h")
    alternatives = [version, os.path.join(path, "include", "torch", "csrc", "api", "include", "torch", "version.h")]
    for header in alternatives:
        if os.path.exists(header):
            text = open(header).read()
            numbers = [part for part in text.split("\n") if "TORCH_VERSION_" in part and "#define" in part]
            found = {line.split()[1]: line.split()[2] for line in numbers if len(line.split()) == 3}
            if found.get("TORCH_VERSION_MAJOR") == "2" and found.get("TORCH_VERSION_MINOR") == "11":
                return True
    return False


def link_parts(torch, library_dirs, out):
    """Links the needed headers and libraries of the package folder `torch` into `out`."""
    work = out + ".partial%d" % os.getpid()
    shutil.rmtree(work, ignore_errors=True)
    os.makedirs(os.path.join(work, "include"))
    os.makedirs(os.path.join(work, "lib"))
    for name in HEADERS:
        source = os.path.join(torch, "include", name)
        if os.path.isdir(source):
            os.symlink(source, os.path.join(work, "include", name))
    for pattern in LIBRARIES:
        for folder in library_dirs:
            for source in glob.glob(os.path.join(folder, pattern)):
                target = os.path.join(work, "lib", os.path.basename(source))
                if not os.path.exists(target):
                    os.symlink(source, target)
    shutil.rmtree(out, ignore_errors=True)
    os.rename(work, out)
    return out


def from_package(torch, name):
    nvidia = os.path.join(os.path.dirname(torch), "nvidia", "cu13", "lib")
    return link_parts(torch, [os.path.join(torch, "lib"), nvidia], os.path.join(CACHE, name))


def from_pip():
    out = os.path.join(CACHE, "libtorch-" + VERSION)
    if os.path.exists(os.path.join(out, "complete")):
        return out
    os.makedirs(CACHE, exist_ok=True)
    if shutil.disk_usage(CACHE).free < FREE_BYTES:
        fail("not enough disk under %s: fetching LibTorch takes 3 GiB, %.1f GiB are free"
             % (CACHE, shutil.disk_usage(CACHE).free / 2**30))
    sys.stderr.write("Fetching LibTorch %s with pip (once, into %s)\n" % (VERSION, CACHE))
    with tempfile.TemporaryDirectory(dir=CACHE) as wheels:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", wheels] + WHEELS
        try:
            done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        except OSError as error:
            fail("cannot run pip: %s" % error)
        if done.returncode != 0:
            reason = [line for line in done.stderr.split("\n") if line.startswith("ERROR")] or ["no reason given"]
            fail("pip could not download %s: %s" % (", ".join(WHEELS), reason[-1]))
        work = os.path.join(wheels, "unpacked")
        for wheel in glob.glob(os.path.join(wheels, "*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    if name.endswith("/"):
                        continue
                    if name.startswith(tuple("torch/include/%s/" % h for h in HEADERS)):
                        target = name[len("torch/"):]
                    elif os.path.basename(name) in LIBRARIES:
                        target = "lib/" + os.path.basename(name)
                    else:
                        continue
                    path = os.path.join(work, target)
                    os.makedirs(os.path.dirname(path), exist_ok=True)
                    with archive.open(name) as source, open(path, "wb") as sink:
                        shutil.copyfileobj(source, sink, 1 << 20)
        open(os.path.join(work, "complete"), "w").close()
        shutil.rmtree(out, ignore_errors=True)
        os.rename(work, out)
    return out


def installed_torch():
    """The folder of an installed Python torch, found without importing it."""
    code = "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
    done = subprocess.run(["python3", "-c", code], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def main():
    given = os.environ.get("LIBTORCH_PATH", "")
    if given:
        if not is_libtorch(given):
            fail("LIBTORCH_PATH=%s is not LibTorch 2.11 (include/torch/.../version.h says otherwise or is missing)" % given)
        print(from_package(given, "libtorch-given"))
        return
    torch = installed_torch()
    print(from_package(torch, "libtorch-python") if torch and is_libtorch(torch) else from_pip())


if __name__ == "__main__":
    main()
