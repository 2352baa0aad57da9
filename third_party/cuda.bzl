"""What targets of the CUDA build say of themselves."""

# `target_compatible_with = NEEDS_CUDA`: the target is left out of `//...` unless --config=cuda is given,
# and asking for it by name without that is an error. (Bazel 4 has no @platforms//:incompatible.)
NEEDS_CUDA = select({
    "//third_party:cuda": [],
    "//conditions:default": ["//third_party:built_with_cuda"],
})
