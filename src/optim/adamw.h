#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "src/optim/optimizer.h"

namespace ppfsdp::optim {

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  /// Decoupled: the parameter shrinks by lr * weight_decay before the update.
  double weight_decay = 1e-2;
  Implementation implementation = Implementation::kForeach;
};

/// AdamW with the formulas, and to the bit the results, of Python's torch.optim.AdamW:
///
///   p *= 1 - lr wd;  m = lerp(m, g, 1 - beta1);  v = beta2 v + (1 - beta2) g g
///   p -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
///
/// (torch::optim::AdamW computes m as beta1 m + (1 - beta1) g, which differs in bits.) State:
/// "exp_avg" (m) and "exp_avg_sq" (v).
class AdamW : public Optimizer {
 public:
  /// Throws for a negative lr, eps or weight_decay and betas outside [0, 1).
  explicit AdamW(std::vector<at::Tensor> parameters, const AdamWOptions& options = {});

  /// options().lr is the one it started with.
  const AdamWOptions& options() const { return options_; }

 protected:
  void update(Batch& batch) override;

 private:
  void update_single(Batch& batch) const;
  void update_foreach(Batch& batch) const;
  void update_fused(Batch& batch) const;

  AdamWOptions options_;
};

}  // namespace ppfsdp::optim
