#include "src/nn/init.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/nn/init.h>

#include <cmath>
#include <numbers>

namespace ppfsdp::nn {
namespace {

double normal_cdf(double x) { return (1.0 + std::erf(x / std::sqrt(2.0))) / 2.0; }

}  // namespace

void trunc_normal_(at::Tensor& tensor, double mean, double std, double low, double high) {
  TORCH_CHECK(std > 0, "trunc_normal_: std is ", std, ", must be positive");
  TORCH_CHECK(low < high, "trunc_normal_: the range [", low, ", ", high, "] is empty");
  at::NoGradGuard no_grad;
  const double from = normal_cdf((low - mean) / std);
  const double to = normal_cdf((high - mean) / std);
  tensor.uniform_(2 * from - 1, 2 * to - 1);
  tensor.erfinv_();
  tensor.mul_(std * std::numbers::sqrt2);
  tensor.add_(mean);
  tensor.clamp_(low, high);
}

Initializer normal(double mean, double std) {
  TORCH_CHECK(std >= 0, "normal: std is ", std, ", must not be negative");
  return [mean, std](at::Tensor& parameter) {
    at::NoGradGuard no_grad;
    parameter.normal_(mean, std);
  };
}

Initializer trunc_normal(double mean, double std, double low, double high) {
  return [=](at::Tensor& parameter) { trunc_normal_(parameter, mean, std, low, high); };
}

Initializer ones() {
  return [](at::Tensor& parameter) {
    at::NoGradGuard no_grad;
    parameter.fill_(1);
  };
}

Initializer kaiming_uniform() {
  return [](at::Tensor& parameter) {
    // With a = sqrt(5) the bound is sqrt(6 / ((1 + a^2) fan_in)) = 1 / sqrt(fan_in).
    torch::nn::init::kaiming_uniform_(parameter, std::sqrt(5.0));
  };
}

}  // namespace ppfsdp::nn
