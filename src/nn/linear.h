#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

#include <cstdint>

#include "src/nn/init.h"
#include "src/nn/module.h"

namespace ppfsdp::nn {

/// y = x weight^T + bias.
class LinearImpl : public Module {
 public:
  struct Options {
    bool bias = true;
    /// Of the weight. The bias starts uniform in +-1/sqrt(in_features).
    Initializer init = kaiming_uniform();
    c10::TensorOptions tensor;
  };

  /// Values are initial ones (reset_parameters).
  LinearImpl(int64_t in_features, int64_t out_features, Options options);
  /// Without bias, by the parameter [out_features, in_features] of another module, which alone
  /// resets it.
  explicit LinearImpl(at::Tensor tied_weight);
  LinearImpl(int64_t in_features, int64_t out_features)
      : LinearImpl(in_features, out_features, Options()) {}

  /// [..., in_features] to [..., out_features].
  at::Tensor forward(const at::Tensor& x);
  void reset_parameters() override;

  at::Tensor weight;  ///< [out_features, in_features]
  at::Tensor bias;    ///< [out_features], or undefined

 private:
  Initializer init_;
};
PPFSDP_MODULE(Linear);

}  // namespace ppfsdp::nn
