#pragma once

#include <ATen/core/Tensor.h>

namespace ppfsdp::nn {

/// Mean cross-entropy over all tokens, computed in float32. `logits` is [batch, seq, vocab],
/// `labels` int64 [batch, seq]; the result has no dims. Labels of -100 are left out of the mean.
at::Tensor next_token_loss(const at::Tensor& logits, const at::Tensor& labels);

}  // namespace ppfsdp::nn
