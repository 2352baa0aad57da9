#pragma once

#include <ATen/core/Tensor.h>

namespace ppfsdp::optim {

/// What this rank holds of a tensor: a DTensor's local part, or the tensor itself. Elementwise work
/// on it needs no dispatch through DTensor.
const at::Tensor& local_part(const at::Tensor& tensor);

/// Tells autograd's check of saved tensors that `tensor`, and a DTensor's local part, changed; for
/// work on local_part below autograd.
void note_write(const at::Tensor& tensor);

}  // namespace ppfsdp::optim
