#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "src/optim/total_norm.h"

namespace ppfsdp::optim {

/// Scales the gradients of `parameters` so that their norm together becomes at most `max_norm` (not
/// negative): get_total_norm of the gradients, then clip_grads_with_norm_. Returns the norm before,
/// without waiting for the device unless an option does. To the bit what Python's
/// torch.nn.utils.clip_grad_norm_ gives. (LibTorch's C++ function of this name rounds the factor
/// once instead of twice, which shows unless max_norm is a power of two.) Parameters without a
/// gradient are passed over. When the norm is an error (options.error_if_nonfinite), the gradients
/// stay; so they do with an infinite `max_norm`, which measures only (in Python an infinite norm
/// then makes them NaN).
at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                           const NormOptions& options = {});
/// With arguments as in Python.
at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                           double norm_type, bool error_if_nonfinite = false, bool foreach = true);

/// Multiplies each gradient of `parameters` by min(1, max_norm / (total_norm + 1e-6)), to the bit
/// as Python's torch.nn.utils.clip_grads_with_norm_. `total_norm` has no dims; it may be of more or
/// other tensors than these, so that lists of several kinds of parameters can be clipped by one
/// norm. A DTensor is made whole first. Gradients that are DTensors may lie on any meshes, in any
/// placements: each rank scales its part.
void clip_grads_with_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                           const at::Tensor& total_norm, bool foreach = true);

}  // namespace ppfsdp::optim
