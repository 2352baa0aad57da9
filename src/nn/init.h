#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace ppfsdp::nn {

/// Gives a parameter its initial values in place, with the default generator. Without autograd.
using Initializer = std::function<void(at::Tensor& parameter)>;

/// Values of N(mean, std^2) restricted to [low, high], by the inverse of the normal distribution
/// function at uniform draws. The operations are those of Python's torch.nn.init.trunc_normal_, so
/// that one seed gives one set of bits in both. Throws unless std > 0 and low < high.
void trunc_normal_(at::Tensor& tensor, double mean, double std, double low, double high);

/// Initializers by name.
Initializer normal(double mean, double std);
Initializer trunc_normal(double mean, double std, double low, double high);
Initializer ones();
/// Uniform in +-1/sqrt(fan in), what torch::nn::Linear does.
Initializer kaiming_uniform();

}  // namespace ppfsdp::nn
