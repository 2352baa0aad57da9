"""Finds LibTorch's CUDA part, the CUDA libraries that it needs, CUDA's headers, and NCCL.

Usage: find_libtorch_cuda.py [FILE [LIBTORCH_CPU]]. Writes one JSON object with their paths to FILE
when it is given. LIBTORCH_CPU is the libtorch_cpu.so that the build links, by default that of
find_libtorch.py: the CUDA part is taken from the same LibTorch, or there is an error.

Looked for in this order:
1. LibTorch's CUDA part: in the LibTorch that the build links ($LIBTORCH_PATH, or a Python torch);
   in a Python torch 2.11 that this python3 would import, if its CPU part is the same to the byte.
2. All else: in the nvidia packages beside that Python torch; in the CUDA toolkit ($CUDA_HOME, else
   /usr/local/cuda); NCCL also in the system's folders.
3. What is in none of them: in pip's wheels (wheels_cuda.txt), the needed parts of which are
   unpacked into ~/.cache/ppfsdp once. With $LIBTORCH_PATH nothing is fetched: what is missing is an
   error.

Errors, and processes that run this at once: as in find_libtorch.py.
"""

import collections
import filecmp
import glob
import math
import mmap
import os
import re
import subprocess
import sys

import find_libtorch
from find_libtorch import Failure

WHEELS = os.path.join(find_libtorch.HERE, "wheels_cuda.txt")
# What the wheels hold; a LibTorch that is given or installed may be one for another.
CUDA_MAJOR = 13
NCCL_NEEDED = (2, 28)
# Tensors on a GPU come with the first, their linear algebra with the second: each registers itself
# when it is loaded, so that both are loaded though nothing of the second is called by name.
REGISTERED = ["libtorch_cuda.so", "libtorch_cuda_linalg.so"]
TOOLKIT = "/usr/local/cuda"
# Where Debian's and NVIDIA's packages put NCCL.
SYSTEM_HEADERS = ["/usr/local/include", "/usr/include"]
SYSTEM_LIBRARIES = ["/usr/local/lib", "/usr/lib/x86_64-linux-gnu"]

# A wheel, the files of it that are needed, and how much of it is kept.
Part = collections.namedtuple("Part", "wheel libraries headers megabytes")
PARTS = [
    Part("torch", REGISTERED + ["libc10_cuda.so", "libtorch_nvshmem.so"], [], 514),
    Part(
        "nvidia-cuda-runtime",
        [],
        ["cuda.h", "cuda_runtime.h", "cuda_runtime_api.h", "cuda_fp16.h"],
        6,
    ),
    Part("nvidia-cuda-crt", [], ["crt/host_defines.h"], 2),
    Part("nvidia-cuda-cccl", [], ["nv/target"], 1),
    Part("nvidia-nccl-cu13", ["libnccl.so.2"], ["nccl.h"], 218),
    Part("nvidia-cublas", ["libcublas.so.13", "libcublasLt.so.13"], [], 596),
    # The shim is linked; it loads the others when they are needed.
    Part(
        "nvidia-cudnn-cu13",
        ["libcudnn.so.9"]
        + [
            "libcudnn_%s.so.9" % name
            for name in (
                "adv",
                "cnn",
                "engines_precompiled",
                "engines_runtime_compiled",
                "graph",
                "heuristic",
                "ops",
            )
        ],
        [],
        494,
    ),
    Part("nvidia-cufft", ["libcufft.so.12"], [], 287),
    Part("nvidia-cufile", ["libcufile.so.0"], [], 4),
    Part("nvidia-curand", ["libcurand.so.10"], [], 133),
    Part("nvidia-cusolver", ["libcusolver.so.12"], [], 142),
    Part("nvidia-cusparse", ["libcusparse.so.12"], [], 163),
    Part("nvidia-cusparselt-cu13", ["libcusparseLt.so.0"], [], 234),
    Part("nvidia-nvjitlink", ["libnvJitLink.so.13"], [], 99),
    Part("nvidia-nvshmem-cu13", ["libnvshmem_host.so.3"], [], 42),
    Part("nvidia-cuda-nvrtc", ["libnvrtc.so.13", "libnvrtc-builtins.so.13.0"], [], 114),
]
# The largest wheel, which pip may hold twice while it is unpacked.
WHEEL_MEGABYTES = 2 * 540

# Folders that are searched in turn, and why others are not, for the error when nothing is found.
Places = collections.namedtuple("Places", "libraries headers passed")


def folders(root, names):
    return [path for path in (os.path.join(root, name) for name in names) if os.path.isdir(path)]


def first(name, searched):
    """The path of the file `name` in the first of the folders `searched` that has it, or None."""
    for folder in searched:
        path = os.path.join(folder, name)
        if os.path.exists(path):
            return path
    return None


def defined(header, names):
    """The numbers that the file `header` defines the macros `names` as; None if one is missing."""
    with open(header, errors="replace") as file:
        found = dict(re.findall(r"^#\s*define\s+(\w+)\s+(\d+)", file.read(), re.MULTILINE))
    numbers = tuple(int(found[name]) for name in names if name in found)
    return numbers if len(numbers) == len(names) else None


def cuda_of(searched):
    """The version (major, minor) of the CUDA headers in the folders `searched`, or None."""
    header = first("cuda.h", searched)
    code = defined(header, ["CUDA_VERSION"]) if header else None
    return (code[0] // 1000, code[0] % 1000 // 10) if code else None


def of_major(major, libraries, headers):
    """These folders without those whose headers are of another major version of CUDA."""
    versions = {folder: cuda_of([folder]) for folder in headers}
    other = [folder for folder, version in versions.items() if version and version[0] != major]
    return Places(
        libraries,
        [folder for folder in headers if folder not in other],
        ["%s is CUDA %s" % (folder, dotted(versions[folder])) for folder in other],
    )


def toolkit(major, say):
    """The folders of the CUDA toolkit; none when there is none of the version `major`."""
    given = os.environ.get("CUDA_HOME", "")
    root = os.path.abspath(given or TOOLKIT)
    target = "targets/x86_64-linux/"
    libraries = folders(root, ["lib64", "lib", target + "lib"])
    found = of_major(
        major,
        libraries,
        folders(root, ["include", "include/cccl", target + "include", target + "include/cccl"]),
    )
    # A toolkit for running programs has no headers.
    if not found.passed and first("libcudart.so.%d" % major, libraries):
        return found
    if given and not found.passed:
        raise Failure(
            "CUDA_HOME: %s is not a CUDA toolkit %d: it has no libcudart.so.%d"
            % (root, major, major)
        )
    # A library of another CUDA may bear the same name, such as libcudnn.so.9.
    if given:
        say("CUDA_HOME is not used: %s, and %d is needed" % (found.passed[0], major))
    return Places([], [], found.passed)


def packages_beside(torch, major):
    """The folders of the nvidia packages that pip installs with the Python torch in `torch`."""
    nvidia = os.path.join(os.path.dirname(torch), "nvidia")
    return of_major(
        major,
        sorted(glob.glob(os.path.join(nvidia, "*", "lib"))),
        sorted(glob.glob(os.path.join(nvidia, "*", "include"))),
    )


def nccl_of_header(header):
    return defined(header, ["NCCL_MAJOR", "NCCL_MINOR", "NCCL_PATCH"])


def nccl_of_library(library):
    """The version that the file `library` states in its text, or None."""
    if os.path.getsize(library) == 0:
        return None  # mmap refuses it.
    with open(library, "rb") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            found = re.search(rb"NCCL version (\d+)\.(\d+)\.(\d+)", text)
            return tuple(int(number) for number in found.groups()) if found else None


def dotted(version):
    return ".".join(str(number) for number in version) if version else "of an unknown version"


def cuda_needed(root):
    """The major version of CUDA that the CUDA part in the folder `root` is linked with."""
    library = os.path.join(root, "lib", REGISTERED[0])
    done = subprocess.run(
        ["ldd", library], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    found = re.search(r"libcudart\S*\.so\.(\d+)", done.stdout)
    if not found:
        said = done.stdout.strip().split("\n")[-1].strip()
        raise Failure(
            "%s needs no libcudart.so, so that its CUDA is not known: %s" % (library, said)
        )
    return int(found.group(1))


def nccl_header(searched):
    """(the first nccl.h in `searched` that is new enough, or None; what is wrong with others)"""
    passed = []
    for header in (first("nccl.h", [folder]) for folder in searched):
        version = nccl_of_header(header) if header else None
        if version and version >= NCCL_NEEDED:
            return header, passed
        if header:
            passed.append("%s is NCCL %s" % (header, dotted(version)))
    return None, passed


def headers_of(places, major):
    """The headers to present: those of CUDA and those of NCCL, each {name in the folder: path}."""
    names = [name for part in PARTS for name in part.headers if name != "nccl.h"]
    # Those of one release where one folder has them all: the nvidia packages lack some.
    ordered = sorted(
        places.headers, key=lambda folder: not all(first(name, [folder]) for name in names)
    )
    found = {}
    for name in names:
        found[name] = first(name, ordered)
        if found[name] is None:
            raise Failure(
                "no header %s in %s%s; set CUDA_HOME to a CUDA toolkit %d"
                % (name, listed(places.headers), because(places.passed), major)
            )
    searched = places.headers + SYSTEM_HEADERS
    nccl, passed = nccl_header(searched)
    if nccl is None:
        raise Failure(
            "no header nccl.h in %s%s; install NCCL %s or later"
            % (listed(searched), because(passed), dotted(NCCL_NEEDED))
        )
    main = os.path.dirname(found["cuda_runtime_api.h"])
    cuda = {
        name: os.path.join(main, name)
        for name in sorted(os.listdir(main))
        if name.endswith((".h", ".hpp")) and not name.startswith("nccl")
    }
    for name, path in found.items():
        folder, _, base = name.rpartition("/")
        cuda[folder or base] = os.path.dirname(path) if folder else path
    return cuda, {"nccl.h": nccl}


def listed(searched):
    return ", ".join(searched) or "any folder"


def because(passed):
    return " (%s)" % ", ".join(passed) if passed else ""


def provided(part, places):
    """Whether all files of `part` are in `places`."""
    if not all(first(name, places.libraries) for name in part.libraries):
        return False
    if "nccl.h" in part.headers:
        version = nccl_of_library(first("libnccl.so.2", places.libraries))
        return bool(version and version >= NCCL_NEEDED and nccl_header(places.headers)[0])
    return all(first(name, places.headers) for name in part.headers)


def describe(libtorch, cuda, places):
    """What the build needs; a Failure says what is wrong.

    `libtorch` is the folder of the LibTorch that is linked, `cuda` that of its CUDA part.
    """
    linked = find_libtorch.libraries_of(libtorch)
    searched = places.libraries + [os.path.join(libtorch, "lib")]
    cuda_headers, nccl_headers = headers_of(places, cuda_needed(cuda))
    loaded = {}
    for name in REGISTERED:
        loaded.update(find_libtorch.loaded_with(os.path.join(cuda, "lib", name), searched))
    # NCCL may be part of libtorch_cuda.so: then another is linked beside it.
    nccl = loaded.get("libnccl.so.2") or first("libnccl.so.2", searched + SYSTEM_LIBRARIES)
    if nccl is None:
        raise Failure(
            "no libnccl.so.2 in %s: install NCCL %s or later"
            % (listed(searched + SYSTEM_LIBRARIES), dotted(NCCL_NEEDED))
        )
    version, declared = nccl_of_library(nccl), nccl_of_header(nccl_headers["nccl.h"])
    if version is None or version < NCCL_NEEDED:
        raise Failure(
            "%s is NCCL %s; %s or later is needed" % (nccl, dotted(version), dotted(NCCL_NEEDED))
        )
    if declared[:2] > version[:2]:
        raise Failure(
            "%s declares NCCL %s, but %s is NCCL %s: they must be of one release"
            % (nccl_headers["nccl.h"], dotted(declared), nccl, dotted(version))
        )
    libraries = {
        name: path
        for name, path in loaded.items()
        if name not in linked and not find_libtorch.of_system(path)
    }
    libraries["libnccl.so.2"] = nccl
    used = {os.path.realpath(os.path.dirname(path)): None for path in libraries.values()}
    for folder in used:
        if re.search(r"[\s,:;$'\"\\]", folder):
            raise Failure("%r cannot be linked from: its name has a space or a separator" % folder)
    return {
        "libraries": sorted(libraries),
        "library_folders": list(used),
        "cuda_headers": {name: os.path.realpath(path) for name, path in cuda_headers.items()},
        "nccl_headers": {name: os.path.realpath(path) for name, path in nccl_headers.items()},
    }


def wanted(name):
    """Where a wheel's file `name` belongs in the unpacked CUDA part; None when it is not needed."""
    folder, _, base = name.rpartition("/")
    if folder.endswith("/lib"):
        return "lib/" + base if any(base in part.libraries for part in PARTS) else None
    inside = re.fullmatch(r"nvidia/\w+/include/((?:crt/|nv/|nv/detail/)?[^/]+)", name)
    return "include/" + inside[1] if inside else None


def fill(root, parts):
    """Fetches `parts` into `root`, one wheel at a time, for the disk's sake."""
    with open(WHEELS) as file:
        lines = dict(re.findall(r"^(([\w-]+)==.*)$", file.read(), re.MULTILINE))
    lines = {name: line for line, name in lines.items()}
    one = os.path.join(root, os.path.basename(WHEELS))
    for part in parts:
        with open(one, "w") as file:
            file.write(lines[part.wheel] + "\n")
        find_libtorch.fetch_wheels(root, one, wanted)
        if not whole(root, [part]):
            raise Failure("the wheel of %s lacks a file that is needed" % part.wheel)
    os.remove(one)


def whole(root, parts):
    return all(
        os.path.exists(os.path.join(root, folder, name))
        for part in parts
        for folder, names in (("lib", part.libraries), ("include", part.headers))
        for name in names
    )


def has_cuda(root):
    return os.path.exists(os.path.join(root, "lib", REGISTERED[0]))


def same_libtorch(one, other):
    """Whether the CPU parts in the folders `one` and `other` are the same to the byte."""
    return all(
        os.path.exists(os.path.join(other, "lib", name))
        and filecmp.cmp(*(os.path.join(root, "lib", name) for root in (one, other)), shallow=False)
        for name in ("libc10.so", "libtorch_cpu.so")
    )


def cuda_part_of(libtorch, fetched, say):
    """The folder with the CUDA part of `libtorch`, which is linked; None when it must be fetched."""
    if has_cuda(libtorch):
        return libtorch
    if os.environ.get("LIBTORCH_PATH", ""):
        raise Failure("it is a LibTorch without CUDA: %s/lib has no libtorch_cuda.so" % libtorch)
    installed = find_libtorch.installed_torch()
    if installed and os.path.realpath(installed) != libtorch:
        if has_cuda(installed) and same_libtorch(libtorch, installed):
            return installed
        why = "is not the LibTorch that is linked" if has_cuda(installed) else "has no CUDA"
        say("The installed Python torch is not used: %s %s" % (installed, why))
    if libtorch != os.path.realpath(fetched):
        raise Failure(
            "%s, which the build links, is a LibTorch without CUDA: set LIBTORCH_PATH to a LibTorch"
            " %s with CUDA, or run with a PATH whose python3 has no torch"
            % (libtorch, find_libtorch.VERSION)
        )
    return None


def find_beside(libtorch, say):
    """Describes the CUDA part of the LibTorch in the folder `libtorch`, which is linked."""
    libtorch = os.path.realpath(libtorch)
    cache = find_libtorch.cache_dir()
    cuda = cuda_part_of(libtorch, os.path.join(cache, "libtorch-" + find_libtorch.VERSION), say)
    major = cuda_needed(cuda) if cuda else CUDA_MAJOR
    places = toolkit(major, say)
    if cuda:
        beside = packages_beside(cuda, major)
        places = Places(
            [os.path.join(cuda, "lib")] + beside.libraries + places.libraries,
            beside.headers + places.headers,
            beside.passed + places.passed,
        )
    missing = [part for part in PARTS if not provided(part, places)]
    if cuda and (os.environ.get("LIBTORCH_PATH", "") or major != CUDA_MAJOR or not missing):
        return describe(libtorch, cuda, places)
    root = os.path.join(cache, "libtorch-%s-cuda" % find_libtorch.VERSION)
    with find_libtorch.locked(root + ".lock", say):
        if not whole(root, missing):
            megabytes = sum(part.megabytes for part in missing)
            find_libtorch.fetch(
                root,
                "LibTorch %s's CUDA part" % find_libtorch.VERSION,
                megabytes / 1000,
                math.ceil((megabytes + WHEEL_MEGABYTES) / 1000),
                say,
                lambda folder: fill(folder, missing),
            )
    # First, because what the toolkit has in a release that does not fit was fetched too.
    places = Places(
        [os.path.join(root, "lib")] + places.libraries,
        [os.path.join(root, "include")] + places.headers,
        places.passed,
    )
    return describe(libtorch, cuda or root, places)


def find(say):
    if len(sys.argv) > 2:
        libtorch = os.path.dirname(os.path.dirname(os.path.realpath(sys.argv[2])))
    else:
        libtorch = find_libtorch.find(say)["root"]
    try:
        return find_beside(libtorch, say)
    except Failure as failure:
        raise Failure(("LIBTORCH_PATH: %s" if os.environ.get("LIBTORCH_PATH") else "%s") % failure)


if __name__ == "__main__":
    find_libtorch.run(find, "LibTorch with CUDA")
