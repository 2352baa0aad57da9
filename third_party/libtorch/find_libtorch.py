"""Finds the headers and libraries of LibTorch 2.11 that ppFSDP uses.

Usage: find_libtorch.py [FILE]. Writes one JSON object with their paths to FILE when it is given.

Looked for in this order:
1. $LIBTORCH_PATH: an unpacked LibTorch or the folder of a Python torch package;
2. what an earlier run fetched into ~/.cache/ppfsdp;
3. a Python torch 2.11 that this python3 would import;
4. pip's wheels of it (wheels.txt), the needed parts of which are unpacked into ~/.cache/ppfsdp.

Any number of processes may run this at once: one fetches, the others wait. A fetch that was ended
half-way leaves nothing that a later run would take for whole. An error is one line on standard
error and exit code 1.
"""

import contextlib
import ctypes
import errno
import fcntl
import glob
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import zipfile

HERE = os.path.dirname(os.path.abspath(__file__))
VERSION = "2.11.0"
WHEELS = os.path.join(HERE, "wheels.txt")
# The wheels' own tags: the same wheel is asked for whatever python3 runs this.
WHEEL_TAGS = [
    "--only-binary=:all:",
    "--implementation=cp",
    "--python-version=3.11",
    "--abi=cp311",
]
WHEEL_TAGS += [
    "--platform=manylinux%s_x86_64" % glibc
    for glibc in ["2010", "2014"] + ["_2_%d" % minor for minor in range(12, 29)]
]
# include/ carries other projects' headers too (fmt, protobuf), which would shadow Debian's.
HEADERS = ["ATen", "c10", "caffe2", "torch"]
LIBRARIES = ["libtorch_cpu.so", "libc10.so", "libgomp.so.1", "libcudart.so.13", "libcupti.so.13"]
# The wheels take 0.5 GB, what is unpacked of them as much, and pip may hold a second copy.
FREE_GIB = 2
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class Failure(Exception):
    """What is wrong and what would be right, in one line for the user."""


def absolute(path, variable):
    """`path` if it is absolute; from where others are would depend on who runs this."""
    if not os.path.isabs(path):
        raise Failure("%s: %r must be an absolute path" % (variable, path))
    return path


def cache_dir():
    home = os.environ.get("HOME", "")
    if not home:
        raise Failure("HOME is not set: LibTorch is kept under $HOME/.cache/ppfsdp")
    cache = os.path.join(absolute(home, "HOME"), ".cache", "ppfsdp")
    try:
        os.makedirs(cache, exist_ok=True)
    except OSError as error:
        raise Failure(
            "cannot make %s: %s; set HOME to a folder that can be written to"
            % (cache, error.strerror)
        )
    if not os.access(cache, os.W_OK):
        raise Failure("%s cannot be written to; set HOME to a folder that can" % cache)
    return cache


def version_of(root):
    """The "major.minor" that the headers of the package folder `root` state, or None."""
    for header in ("torch/headeronly/version.h", "torch/csrc/api/include/torch/version.h"):
        try:
            with open(os.path.join(root, "include", header)) as file:
                found = dict(re.findall(r"#define TORCH_VERSION_(MAJOR|MINOR) (\d+)", file.read()))
        except PermissionError as error:
            raise Failure("%s cannot be read: %s" % (error.filename, error.strerror))
        except OSError:
            continue
        if len(found) == 2:
            return "%s.%s" % (found["MAJOR"], found["MINOR"])
    return None


def loaded_with(library, folders=()):
    """{file name: path} of what the loader finds for `library`, which may also lie in `folders`.

    Paths are as the loader names them; the system's own libraries are among them.
    """
    environment = {key: os.environ[key] for key in os.environ if not key.startswith("LD_")}
    if folders:
        environment["LD_LIBRARY_PATH"] = ":".join(folders)
    # -r also asks whether each symbol is there, which it is not in a library of another release.
    done = subprocess.run(
        ["ldd", "-r", library],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    wrong = re.search(r"\S+ => not found|undefined symbol: [^\s,]+", done.stdout)
    if done.returncode != 0 or wrong:
        said = wrong.group(0) if wrong else done.stdout.strip().split("\n")[-1].strip()
        raise Failure("%s cannot be loaded: %s" % (library, said))
    paths = [library] + re.findall(r" => (/\S+)", done.stdout)
    return {os.path.basename(path): path for path in paths}


def of_system(path):
    return path.startswith(("/lib/", "/lib64/", "/usr/lib"))


def libraries_of(root):
    """Libraries to link, by file name: libtorch_cpu.so and what it needs beyond the system's."""
    loaded = loaded_with(os.path.join(root, "lib", "libtorch_cpu.so"))
    return {name: os.path.realpath(path) for name, path in loaded.items() if not of_system(path)}


def describe(root):
    """What the build needs of the package folder `root`; a Failure says what is wrong with it."""
    version = version_of(root)
    if version is None:
        raise Failure("%s is not a LibTorch: it has no include/torch/headeronly/version.h" % root)
    if version != VERSION.rpartition(".")[0]:
        raise Failure(
            "%s is LibTorch %s; %s is needed" % (root, version, VERSION.rpartition(".")[0])
        )
    headers = {name: os.path.join(root, "include", name) for name in HEADERS}
    needed = list(headers.values())
    needed += [os.path.join(root, "lib", name) for name in ("libc10.so", "libtorch_cpu.so")]
    for path in needed:
        if not os.path.exists(path):
            raise Failure("%s is not whole: %s is missing" % (root, path))
    return {"root": root, "headers": headers, "libraries": libraries_of(root)}


def installed_torch():
    """The folder of the torch that this python3 would import, found without an import; or None."""
    spec = importlib.util.find_spec("torch")
    return spec.submodule_search_locations[0] if spec and spec.submodule_search_locations else None


def python_with_pip():
    for python in dict.fromkeys([sys.executable, "/usr/bin/python3"]):
        with contextlib.suppress(OSError):
            done = subprocess.run([python, "-m", "pip", "--version"], capture_output=True)
            if done.returncode == 0:
                return python
    raise Failure(
        "python3 has no pip: install Debian's python3-pip, or set LIBTORCH_PATH to a LibTorch "
        + VERSION
    )


def reason_of(pip_output, wheels=WHEELS):
    """The one line of pip's standard error that says why it failed to fetch what `wheels` lists."""
    if "No space left on device" in pip_output:
        return "no space left on device"
    connection = re.search(r"connection broken by '(.*)'", pip_output)
    if connection:
        why = re.search(
            r"(?:new connection: (?:\[Errno [-\d]+\] )?|\[SSL: \w+\] )([^'\"()]+)", connection[1]
        )
        return "no network: " + (why[1].strip() if why else connection[1])
    if "DO NOT MATCH THE HASHES" in pip_output:
        return "a wheel does not have the SHA-256 that third_party/libtorch/%s states" % (
            os.path.basename(wheels)
        )
    lines = [line for line in pip_output.split("\n") if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no reason given"])[-1]


def download(folder, wheels):
    """Fetches the wheels that the file `wheels` lists into `folder`."""
    # pip first writes to TMPDIR, whose disk may be too small; its cache would be one more copy.
    environment = dict(os.environ, TMPDIR=folder, PIP_REQUIRE_VIRTUALENV="0")
    command = [python_with_pip(), "-m", "pip", "download", "--no-cache-dir", "--no-deps"]
    command += ["--retries=2", "--require-hashes", "--requirement=" + wheels, "--dest=" + folder]
    command += WHEEL_TAGS
    # On a terminal pip shows how far it is.
    shown = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    libc = ctypes.CDLL(None)
    done = subprocess.run(
        command,
        stdout=shown,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        # When this process is killed pip must not write on where the next run fetches.
        preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
    )
    if done.returncode != 0:
        raise Failure(
            "pip could not fetch LibTorch %s: %s" % (VERSION, reason_of(done.stderr, wheels))
        )


def wanted(name):
    """Where a wheel's file `name` belongs in the unpacked LibTorch; None when it is not needed."""
    if name.endswith("/"):
        return None
    if name.startswith(tuple("torch/include/%s/" % header for header in HEADERS)):
        return name[len("torch/") :]
    folder, _, base = name.rpartition("/")
    return "lib/" + base if base in LIBRARIES and folder.endswith("/lib") else None


def unpack(wheel, root, wanted):
    """Writes the files of `wheel` to where `wanted` says that they belong in `root`."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            target = wanted(name)
            if target:
                path = os.path.join(root, target)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with archive.open(name) as source, open(path, "wb") as sink:
                    shutil.copyfileobj(source, sink, 1 << 20)


def fetch_wheels(root, wheels, wanted):
    """Fetches what the file `wheels` lists and unpacks into `root` what is `wanted` of it."""
    folder = os.path.join(root, "wheels")
    os.mkdir(folder)
    download(folder, wheels)
    for wheel in glob.glob(os.path.join(folder, "*.whl")):
        unpack(wheel, root, wanted)
    shutil.rmtree(folder)


def fetch(root, what, gigabytes, free_gib, say, fill):
    """Makes the folder `root` of what `fill` writes into a folder beside it: whole, or not at all.

    `what` and `gigabytes` tell the user what is fetched; `free_gib` must be free on the disk.
    `fill` raises a Failure when something is missing. The caller holds the lock.
    """
    if platform.machine() != "x86_64":
        raise Failure(
            "the pinned wheels are for x86-64 and this is %s: set LIBTORCH_PATH to a LibTorch %s"
            % (platform.machine(), VERSION)
        )
    work = root + ".partial"
    shutil.rmtree(work, ignore_errors=True)
    free = shutil.disk_usage(os.path.dirname(root)).free
    if free < free_gib << 30:
        raise Failure(
            "not enough disk under %s: fetching LibTorch takes %d GiB, %.1f GiB are free"
            % (os.path.dirname(root), free_gib, free / 2**30)
        )
    say("Fetching %s by pip (once; %.1f GB, into %s)" % (what, gigabytes, root))
    try:
        os.mkdir(work)
        fill(work)
        shutil.rmtree(root, ignore_errors=True)
        os.rename(work, root)
    except zipfile.BadZipFile as error:
        raise Failure("a wheel of LibTorch cannot be unpacked: %s" % error)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def locked(path, say):
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Waiting for another process that fetches LibTorch")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def fill(root):
    fetch_wheels(root, WHEELS, wanted)
    describe(root)


def find(say):
    """Describes the first LibTorch found, in the order that the head of this file states."""
    given = os.environ.get("LIBTORCH_PATH", "")
    if given:
        root = os.path.normpath(absolute(given, "LIBTORCH_PATH"))
        try:
            return describe(root)
        except Failure as failure:
            raise Failure("LIBTORCH_PATH: %s" % failure)
    root = os.path.join(cache_dir(), "libtorch-" + VERSION)
    with contextlib.suppress(Failure):
        return describe(root)
    installed = installed_torch()
    if installed:
        try:
            return describe(installed)
        except Failure as failure:
            say("The installed Python torch is not used: %s" % failure)
    with locked(root + ".lock", say):
        with contextlib.suppress(Failure):
            return describe(root)
        fetch(root, "LibTorch " + VERSION, 0.5, FREE_GIB, say, fill)
    return describe(root)


def run(finder, name):
    """Writes what `finder` finds to the file that is the first argument, if there is one.

    Errors bear the `name` of what is looked for.
    """
    try:
        found = finder(lambda message: sys.stderr.write(message + "\n"))
    except Failure as failure:
        sys.exit("%s: %s" % (name, failure))
    except OSError as error:
        where = " (%s)" % error.filename if error.filename else ""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        why = "no space left on device" if full else error.strerror or error
        sys.exit("%s: %s%s" % (name, why, where))
    except KeyboardInterrupt:
        sys.exit("%s: interrupted" % name)
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w") as file:
            json.dump(found, file)


def main():
    run(find, "LibTorch")


if __name__ == "__main__":
    main()
