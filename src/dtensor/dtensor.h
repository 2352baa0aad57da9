#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <string>

#include "src/dtensor/placement.h"
#include "src/dtensor/sharding.h"
#include "src/dtensor/spec.h"
#include "src/mesh/device_mesh.h"

/// A DTensor is an at::Tensor of global sizes of which each rank of a DeviceMesh holds a part. Ops
/// on it, torch::optim, torch::nn::utils and autograd work as on any tensor; src/dtensor/rule.h
/// says what they do with placements. It has no memory of its own: data_ptr(), torch::save and
/// `std::cout << dtensor` throw; use local_of, full_tensor and to_string.
///
/// Functions that move data are called by every rank of the mesh, in one order.
namespace ppfsdp::dtensor {

/// True for a tensor made by this library's functions below.
bool is_dtensor(const at::Tensor& tensor);
/// The spec of a DTensor; an error for any other tensor.
const SpecPtr& spec_of(const at::Tensor& dtensor);
/// This rank's part, without autograd; shares memory with the DTensor. An error for other tensors.
/// Its version counter counts the writes through the DTensor; the DTensor's counts writes to the
/// local part only where from_local made it.
const at::Tensor& local_of(const at::Tensor& dtensor);

/// Wraps this rank's part, sharing its memory. Global sizes are taken as given, or else derived
/// from the local sizes as even shards. Differentiable: the gradient of `local` is the local part
/// of the result's gradient (of a Partial, whose parts add up: the whole gradient). Throws when the
/// local sizes do not fit the global ones on this rank.
at::Tensor from_local(const at::Tensor& local, const mesh::DeviceMeshPtr& mesh,
                      const Placements& placements,
                      c10::OptionalArrayRef<int64_t> global_sizes = std::nullopt);

/// Shards a full tensor that every rank has alike (no communication), in memory of its own. For a
/// leaf that requires grad the result is a new leaf that requires grad, and whose gradients are
/// brought to its placements.
at::Tensor distribute_tensor(const at::Tensor& tensor, const mesh::DeviceMeshPtr& mesh,
                             const Placements& placements);

/// Differentiable local part, sharing the DTensor's memory. The gradient of a Partial's parts,
/// which add up to the whole, counts as the whole's.
at::Tensor to_local(const at::Tensor& dtensor);

/// The same global value in other placements, moving the fewest bytes; the tensor itself when it
/// has them already. Differentiable.
at::Tensor redistribute(const at::Tensor& dtensor, const Placements& placements);

/// redistribute to Replicate on every mesh dim, then to_local. Differentiable.
at::Tensor full_tensor(const at::Tensor& dtensor);

/// Brings parameter.grad(), if there is one, to the parameter's placements. Throws when the
/// parameter is a DTensor and the gradient, assigned by hand, is not one.
void align_gradient(const at::Tensor& parameter);

/// "DTensor(local=[2, 3] of [4, 3], Float, DeviceMesh(2), [Shard(0)])\n<local values>".
std::string to_string(const at::Tensor& dtensor);

}  // namespace ppfsdp::dtensor
