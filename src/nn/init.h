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
/// The functions of torch::nn::init of these names, bit for bit (the default `a` of
/// kaiming_uniform, sqrt(5), gives +-1/sqrt(fan in), what torch::nn::Linear does). The fans are
/// those of the global sizes, for weights of any number of dims and any sharding; torch::nn::init's
/// own look at element [0][0] of more than two dims, which throws on a DTensor split on the first
/// or second.
Initializer kaiming_uniform(double a = 2.23606797749978969);
Initializer kaiming_normal(double a = 0);
Initializer xavier_uniform(double gain = 1);
Initializer xavier_normal(double gain = 1);

}  // namespace ppfsdp::nn
