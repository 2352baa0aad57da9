"""Finds LibTorch 2.11 and presents the headers and libraries that ppFSDP uses as @libtorch."""

def _libtorch_impl(ctx):
    ctx.path(Label("//third_party/libtorch:wheels.txt"))  # A change of it runs this anew.
    script = ctx.path(Label("//third_party/libtorch:find_libtorch.py"))
    result = ctx.execute(
        ["python3", script, "found.json"],
        timeout = 3600,
        quiet = False,
    )
    if result.return_code != 0:
        fail(result.stderr.strip().split("\n")[-1])
    found = json.decode(ctx.read("found.json"))
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
