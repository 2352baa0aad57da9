"""Finds LibTorch 2.11.0 and presents the headers and libraries that ppFSDP uses as @libtorch."""

def _libtorch_impl(ctx):
    result = ctx.execute(
        ["python3", ctx.path(Label("//third_party/libtorch:find_libtorch.py"))],
        timeout = 3600,
        quiet = False,
    )
    if result.return_code != 0:
        fail("LibTorch: " + result.stderr.strip().split("\n")[-1])
    root = result.stdout.strip().split("\n")[-1]
    ctx.symlink(root + "/include", "include")
    ctx.symlink(root + "/lib", "lib")
    ctx.symlink(Label("//third_party/libtorch:libtorch.BUILD"), "BUILD")

libtorch_repository = repository_rule(
    implementation = _libtorch_impl,
    environ = ["LIBTORCH_PATH", "HOME"],
    doc = "The CPU part of LibTorch: from $LIBTORCH_PATH, an installed Python torch, or pip.",
)
