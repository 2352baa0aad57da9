#include "src/nn/rms_norm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/rsqrt.h>
#include <c10/util/Exception.h>

#include "src/nn/init.h"

namespace ppfsdp::nn {

RMSNormImpl::RMSNormImpl(int64_t dim, double eps, c10::TensorOptions options) : eps_(eps) {
  TORCH_CHECK(dim > 0, "RMSNorm: dim ", dim, " must be positive");
  TORCH_CHECK(eps > 0, "RMSNorm: eps ", eps, " must be positive");
  register_parameter("weight", weight, at::empty({dim}, options));
  reset_parameters();
}

at::Tensor RMSNormImpl::forward(const at::Tensor& x) {
  const at::Tensor x32 = x.to(at::kFloat);
  const at::Tensor mean_square = at::mean(x32 * x32, /*dim=*/{-1}, /*keepdim=*/true);
  return (x32 * at::rsqrt(mean_square + eps_)).to(x.scalar_type()) * weight;
}

void RMSNormImpl::reset_parameters() {
  // The entry, not the slot: under fully_shard this is the sharded parameter.
  ones()(named_parameters(/*recurse=*/false)["weight"]);
}

}  // namespace ppfsdp::nn
