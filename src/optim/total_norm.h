#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "src/mesh/device_mesh.h"

namespace ppfsdp::optim {

/// How the norm of many tensors together is taken.
struct NormOptions {
  /// p: any number, infinity or -infinity. As in Python, norms of norms are taken: p = 0 counts the
  /// tensors that have an element other than 0 (not such elements), and p < 0, of which no norm in
  /// the mathematical sense exists, is (sum |x|^p)^(1/p), 0 as soon as any element is.
  double norm_type = 2.0;
  /// A norm that is infinite or NaN is an error. Waits for the device, as `reproducible` does.
  bool error_if_nonfinite = false;
  /// One operation over all tensors instead of one a tensor.
  bool foreach = true;
  /// The norm is that of the exact sum of |x|^p, rounded once, to float32 (float64 where any tensor
  /// is): the same bits for every mesh, placement, order of the list, number of threads and
  /// backend. (The plain one also errs: LibTorch's of 2^25 normally distributed float32s is 0.2 %
  /// low, of order 1 even 9 %.) For p other than 1 and 2 see add_power_sum. Tensors must be on the
  /// CPU. What the parts of a Partial tensor add up to is rounded before.
  bool reproducible = false;
  /// A mesh over whose ranks *other tensors* lie, as the stages of pipeline parallelism have them,
  /// each with a list of its own, perhaps empty: the norm is then of all stages' tensors.
  mesh::DeviceMeshPtr stages = nullptr;
};

/// The norm of all elements of `tensors` together, a plain tensor without dims, whole on every
/// rank; of no tensors 0.
///
/// Plain tensors give the bits of Python's torch.nn.utils.get_total_norm (unless reproducible),
/// except that where Python refuses an empty tensor (p < 0 or infinite), it has no share here.
///
/// Tensors may be DTensors, on one mesh or several, and plain ones, mixed. Each counts once: a
/// DTensor as a whole, along the dims of its own mesh that split it. So experts that are sharded
/// over an expert-parallel mesh count over its ranks, and a tensor on a submesh counts as equal
/// along the dims that the submesh leaves out, as a plain tensor does on every rank. Every rank
/// passes a list of the same structure: the same number of tensors, and at each index the same
/// global sizes, dtype and placements; the ranks' meshes at an index may be different ones (each
/// rank's own submesh of a parent).
///
/// Each rank takes the norms of its shards; then one all-reduce a group of ranks (a mesh dim, or
/// one that several meshes have in common) makes the norms of all tensors whole at once. A Partial
/// tensor needs a reduction of its own before. Where all tensors are on one mesh in one placement,
/// the bits are those of Python's DTensor in the same order of additions, but for float16: Python
/// adds up the powers of norms in it, where a norm beyond 256 has an infinite square; here that is
/// done in float32.
at::Tensor get_total_norm(const std::vector<at::Tensor>& tensors, const NormOptions& options = {});

}  // namespace ppfsdp::optim
