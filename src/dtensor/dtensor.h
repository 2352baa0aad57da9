#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "src/dtensor/placement.h"
#include "src/mesh/device_mesh.h"

namespace ppfsdp::dtensor {

/// What a DTensor is beside its local part. Interned per mesh: equal specs are one object.
struct Spec {
  mesh::DeviceMeshPtr mesh;
  Placements placements;
  std::vector<int64_t> sizes;    ///< global
  std::vector<int64_t> strides;  ///< global, in elements
  at::ScalarType dtype;
  std::string str() const;
};
using SpecPtr = std::shared_ptr<const Spec>;

/// True for a tensor made by this library's functions below.
bool is_dtensor(const at::Tensor& tensor);
/// The spec of a DTensor; an error for any other tensor.
const SpecPtr& spec_of(const at::Tensor& dtensor);
/// This rank's part, without autograd; shares memory with the DTensor. An error for other tensors.
const at::Tensor& local_of(const at::Tensor& dtensor);

/// Wraps this rank's part. Global sizes are taken as given, or else derived from the local sizes as
/// even shards. Differentiable: the gradient of `local` is the local part of the result's gradient.
/// Throws when the local sizes do not fit the global ones on this rank.
at::Tensor from_local(const at::Tensor& local, const mesh::DeviceMeshPtr& mesh,
                      const Placements& placements,
                      c10::OptionalArrayRef<int64_t> global_sizes = std::nullopt);

/// Shards a full tensor that every rank has alike (no communication). For a leaf that requires grad
/// the result is a new leaf that requires grad.
at::Tensor distribute_tensor(const at::Tensor& tensor, const mesh::DeviceMeshPtr& mesh,
                             const Placements& placements);

/// Differentiable local part.
at::Tensor to_local(const at::Tensor& dtensor);

/// The same global value in other placements, moving the fewest bytes. Differentiable.
at::Tensor redistribute(const at::Tensor& dtensor, const Placements& placements);

/// redistribute to Replicate on every mesh dim, then to_local. Differentiable.
at::Tensor full_tensor(const at::Tensor& dtensor);

/// Sizes of the local part that rank coordinates `coordinates` of `mesh` holds.
std::vector<int64_t> local_sizes(c10::ArrayRef<int64_t> global_sizes, const mesh::DeviceMesh& mesh,
                                 const Placements& placements,
                                 const std::vector<int64_t>& coordinates);

/// "DTensor(local=[2, 3] of [4, 3], float, DeviceMesh(2), [Shard(0)])\n<local values>".
std::string to_string(const at::Tensor& dtensor);

}  // namespace ppfsdp::dtensor
