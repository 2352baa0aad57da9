#pragma once

#include <ATen/core/Tensor.h>

#include "src/dtensor/spec.h"

namespace ppfsdp::dtensor {

/// This rank's part under `to`, given its part under `from`, of a tensor of global sizes `sizes`.
/// No autograd. Every rank of the mesh calls it. Never writes to `local`; the result may share its
/// memory (Replicate to Shard is a slice).
///
/// One mesh dim changes at a time, by the transitions that send the fewest bytes in all
/// (redistribute_plan.h). Short shards are padded for all-gather and reduce-scatter. A norm partial
/// is reduced as x^p, sum, ^(1/p). Along a mesh dim of one rank nothing is computed.
at::Tensor redistribute_local(const at::Tensor& local, const mesh::DeviceMeshPtr& mesh,
                              c10::ArrayRef<int64_t> sizes, const Placements& from,
                              const Placements& to);

/// In place on contiguous `tensor`: the reduction of all ranks' values along `mesh_dim` as Partial
/// of `partial` says. Bool is reduced as integers.
void reduce_along(const at::Tensor& tensor, const mesh::DeviceMesh& mesh, int64_t mesh_dim,
                  const Placement& partial);

}  // namespace ppfsdp::dtensor
