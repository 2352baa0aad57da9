"""Finds LibTorch 2.11 and presents what ppFSDP uses of it as @libtorch and @libtorch_cuda."""

def _found(ctx, script, *arguments):
    """What `script` writes as JSON; its one-line error ends the build."""
    result = ctx.execute(
        ["python3", ctx.path(Label("//third_party/libtorch:" + script)), "found.json"] + list(arguments),
        timeout = 3600,
        quiet = False,
    )
    if result.return_code != 0:
        fail(result.stderr.strip().split("\n")[-1])
    return json.decode(ctx.read("found.json"))

def _libtorch_impl(ctx):
    ctx.path(Label("//third_party/libtorch:wheels.txt"))  # A change of it runs this anew.
    found = _found(ctx, "find_libtorch.py")
    for name, path in found["headers"].items():
        ctx.symlink(path, "include/" + name)
    for name, path in found["libraries"].items():
        ctx.symlink(path, "lib/" + name)
    ctx.symlink(Label("//third_party/libtorch:libtorch.BUILD"), "BUILD")

libtorch_repository = repository_rule(
    implementation = _libtorch_impl,
    environ = ["LIBTORCH_PATH", "HOME"],
    doc = "The CPU part of LibTorch: from $LIBTORCH_PATH, an installed Python torch, or pip.",
)

def _libtorch_cuda_impl(ctx):
    ctx.path(Label("//third_party/libtorch:wheels_cuda.txt"))
    ctx.path(Label("//third_party/libtorch:find_libtorch.py"))

    # Its CUDA part must be of the very LibTorch that is linked.
    linked = ctx.path(Label("@libtorch//:lib/libtorch_cpu.so"))
    found = _found(ctx, "find_libtorch_cuda.py", linked)
    for folder in ("cuda", "nccl"):
        for name, path in found[folder + "_headers"].items():
            ctx.symlink(path, "%s/%s" % (folder, name))

    # The libraries stay where they are, as some load others that lie beside them.
    folders = ["-L" + folder for folder in found["library_folders"]]
    folders += ["-Wl,-rpath," + folder for folder in found["library_folders"]]
    ctx.template("BUILD", Label("//third_party/libtorch:libtorch_cuda.BUILD"), {
        '"FOLDERS"': ", ".join([repr(option) for option in folders]),
        '"LIBRARIES"': ", ".join([repr("-l:" + name) for name in found["libraries"]]),
    })

libtorch_cuda_repository = repository_rule(
    implementation = _libtorch_cuda_impl,
    environ = ["LIBTORCH_PATH", "HOME", "CUDA_HOME"],
    doc = "LibTorch's CUDA part, CUDA's headers and NCCL. Made when --config=cuda first needs it.",
)
