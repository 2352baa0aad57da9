#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

#include <cstdint>

#include "src/nn/module.h"

namespace ppfsdp::nn {

/// y = x / sqrt(mean(x^2) + eps) * weight, the mean over the last dim. Normalises in float32 and
/// casts back to x's dtype before the multiplication by weight.
class RMSNormImpl : public Module {
 public:
  /// The weight starts as ones.
  explicit RMSNormImpl(int64_t dim, double eps = 1e-5, c10::TensorOptions options = {});

  /// [..., dim] to [..., dim].
  at::Tensor forward(const at::Tensor& x);
  void reset_parameters() override;

  at::Tensor weight;  ///< [dim]

 private:
  double eps_;
};
PPFSDP_MODULE(RMSNorm);

}  // namespace ppfsdp::nn
