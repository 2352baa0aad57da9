#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace ppfsdp::optim {

// fully_shard lays the shards of a group side by side, and the gradients that it reduces too. What
// is elementwise then costs one operation a group instead of one a parameter.

/// Whether `next` begins in memory where `tensor` ends: both contiguous, of one dtype and storage.
bool follows(const at::Tensor& tensor, const at::Tensor& next);

/// `numel` elements from the first of `tensor` (contiguous) on, as one flat tensor over the same
/// memory.
at::Tensor flat_from(const at::Tensor& tensor, int64_t numel);

/// `tensors` in their order, each run of neighbours as one flat tensor over the same memory; others
/// as they are.
std::vector<at::Tensor> join_neighbours(const std::vector<at::Tensor>& tensors);

}  // namespace ppfsdp::optim
