#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "src/optim/optimizer.h"

namespace ppfsdp::optim {

struct SGDOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  /// Added to the gradient, times the parameter.
  double weight_decay = 0;
  bool nesterov = false;
  Implementation implementation = Implementation::kForeach;
};

/// Gradient descent with the formulas, and to the bit the results, of Python's torch.optim.SGD:
///
///   g += wd p;  b = g at the first step, else momentum b + (1 - dampening) g
///   p -= lr * (nesterov ? g + momentum b : b),  or lr * g without momentum
///
/// Gradients are left as they are. State, with momentum: "momentum_buffer" (b).
class SGD : public Optimizer {
 public:
  /// Throws for a negative lr, momentum or weight_decay, and for nesterov without momentum or with
  /// dampening.
  explicit SGD(std::vector<at::Tensor> parameters, const SGDOptions& options = {});

  /// options().lr is the one it started with.
  const SGDOptions& options() const { return options_; }

 protected:
  void update(Batch& batch) override;

 private:
  void update_single(Batch& batch) const;
  void update_foreach(Batch& batch) const;
  void update_fused(Batch& batch) const;

  SGDOptions options_;
};

}  // namespace ppfsdp::optim
