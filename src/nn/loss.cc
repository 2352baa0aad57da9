#include "src/nn/loss.h"

#include <ATen/ops/cross_entropy_loss.h>
#include <c10/util/Exception.h>

namespace ppfsdp::nn {

at::Tensor next_token_loss(const at::Tensor& logits, const at::Tensor& labels) {
  TORCH_CHECK(logits.dim() == 3 && labels.dim() == 2 && logits.size(0) == labels.size(0) &&
                  logits.size(1) == labels.size(1),
              "next_token_loss: logits ", logits.sizes(), " and labels ", labels.sizes(),
              " must be [batch, seq, vocab] and [batch, seq]");
  return at::cross_entropy_loss(logits.to(at::kFloat).flatten(0, 1), labels.flatten());
}

}  // namespace ppfsdp::nn
