#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace ppfsdp::optim {

/// Scales the gradients of `parameters` by min(1, max_norm / (norm + 1e-6)), where norm is the norm
/// of order `norm_type` (positive or infinity) of all of them together. Returns the norm before, a
/// plain tensor without dims, without waiting for the device.
///
/// To the bit what Python's torch.nn.utils.clip_grad_norm_ gives. (LibTorch's C++ function of this
/// name rounds the factor once instead of twice, which shows unless max_norm is a power of two.)
/// Gradients of DTensors may be sharded: each rank takes the norms of its shards, and one
/// all-reduce over each mesh dim makes them norms of the whole. All gradients must then be on one
/// mesh; parameters without a gradient are passed over. `foreach` takes the norms and scales by one
/// operation over all. With `error_if_nonfinite`, a norm that is infinite or NaN is an error, and
/// the gradients stay.
at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                           double norm_type = 2.0, bool error_if_nonfinite = false,
                           bool foreach = true);

}  // namespace ppfsdp::optim
