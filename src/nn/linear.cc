#include "src/nn/linear.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <c10/util/Exception.h>

#include <cmath>

namespace ppfsdp::nn {

LinearImpl::LinearImpl(int64_t in_features, int64_t out_features, Options options)
    : init_(std::move(options.init)) {
  TORCH_CHECK(in_features > 0 && out_features > 0, "Linear: in_features ", in_features,
              " and out_features ", out_features, " must be positive");
  TORCH_CHECK(init_, "Linear: the initializer is empty");
  register_parameter("weight", weight, at::empty({out_features, in_features}, options.tensor));
  if (options.bias) {
    register_parameter("bias", bias, at::empty({out_features}, options.tensor));
  }
  reset_parameters();
}

LinearImpl::LinearImpl(at::Tensor tied_weight) {
  TORCH_CHECK(tied_weight.defined() && tied_weight.dim() == 2,
              "Linear: a tied weight must be [out_features, in_features]");
  const bool requires_grad = tied_weight.requires_grad();
  register_parameter("weight", weight, std::move(tied_weight), requires_grad);
}

at::Tensor LinearImpl::forward(const at::Tensor& x) { return at::linear(x, weight, bias); }

void LinearImpl::reset_parameters() {
  // The entries, not the slots: under fully_shard these are the sharded parameters.
  for (auto& parameter : named_parameters(/*recurse=*/false)) {
    if (parameter.key() == "weight") {
      if (init_) init_(parameter.value());
    } else {
      at::NoGradGuard no_grad;
      const double bound = 1 / std::sqrt(static_cast<double>(weight.size(1)));
      parameter.value().uniform_(-bound, bound);
    }
  }
}

}  // namespace ppfsdp::nn
