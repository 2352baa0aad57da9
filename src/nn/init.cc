#include "src/nn/init.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/nn/init.h>

#include <cmath>
#include <numbers>
#include <tuple>

namespace ppfsdp::nn {
namespace {

double normal_cdf(double x) { return (1.0 + std::erf(x / std::sqrt(2.0))) / 2.0; }

/// Fan in and fan out, of the sizes alone.
std::tuple<int64_t, int64_t> fans(const at::Tensor& weight) {
  return torch::nn::init::_calculate_fan_in_and_fan_out(
      at::empty(weight.sizes(), at::TensorOptions(at::kMeta)));
}

double kaiming_std(const at::Tensor& weight, double a) {
  return torch::nn::init::calculate_gain(torch::kLeakyReLU, a) /
         std::sqrt(static_cast<double>(std::get<0>(fans(weight))));
}

double xavier_std(const at::Tensor& weight, double gain) {
  const auto [in, out] = fans(weight);
  return gain * std::sqrt(2.0 / static_cast<double>(in + out));
}

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

Initializer kaiming_uniform(double a) {
  return [a](at::Tensor& parameter) {
    at::NoGradGuard no_grad;
    const double bound = std::sqrt(3.0) * kaiming_std(parameter, a);
    parameter.uniform_(-bound, bound);
  };
}

Initializer kaiming_normal(double a) {
  return [a](at::Tensor& parameter) {
    at::NoGradGuard no_grad;
    parameter.normal_(0, kaiming_std(parameter, a));
  };
}

Initializer xavier_uniform(double gain) {
  return [gain](at::Tensor& parameter) {
    at::NoGradGuard no_grad;
    const double bound = std::sqrt(3.0) * xavier_std(parameter, gain);
    parameter.uniform_(-bound, bound);
  };
}

Initializer xavier_normal(double gain) {
  return [gain](at::Tensor& parameter) {
    at::NoGradGuard no_grad;
    parameter.normal_(0, xavier_std(parameter, gain));
  };
}

}  // namespace ppfsdp::nn
