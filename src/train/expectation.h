#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "src/comm/reduction.h"
#include "src/train/config.h"
#include "src/train/data_loader.h"
#include "src/train/trainer.h"

namespace ppfsdp::train {

/// What was found at one step. `allowed_*` are 0 where bits must be equal.
struct StepVerdict {
  StepResult sharded;
  double expected_loss = 0;
  double expected_grad_norm = 0;
  double allowed_loss = 0;       ///< magnitude of the losses' difference
  double allowed_grad_norm = 0;  ///< likewise
  /// Largest over all gradients (after clipping), and over all parameters after the step.
  uint64_t gradient_ulps = 0, parameter_ulps = 0;
  double gradient_abs = 0, parameter_abs = 0;
  /// The largest share of its tolerance that a parameter's gradient takes, where there is one.
  double gradient_share = 0;
  /// The first thing that differs by more than is allowed, in the order in which training computes:
  /// what, on which rank, where, and both values. Empty: the step passes.
  std::string first_difference;
};

/// The sharded run's parameters that are compared.
struct ComparedParameters {
  std::vector<std::string> names;
  std::vector<at::Tensor> sharded;  ///< tell which rank holds an element
};

/// What a sharded training is expected to give, computed on one device beside it.
class Expectation {
 public:
  virtual ~Expectation() = default;
  /// Judges the next step of the sharded run: its result, and in full its clipped gradients and its
  /// parameters after the step.
  virtual StepVerdict judge(const StepResult& sharded, const std::vector<at::Tensor>& gradients,
                            const std::vector<at::Tensor>& parameters) = 0;
};

/// Against one process that runs each rank's microbatches in turn on a plain model and folds the
/// gradients in `order` (ReferenceTrainer): losses, norm, gradients and parameters must have equal
/// bits. `data` must outlive it.
std::unique_ptr<Expectation> make_exact_expectation(const Config& config, const DataLoader& data,
                                                    comm::ReductionOrder order,
                                                    ComparedParameters compared);

/// Against one device over the whole batch, which adds in another order, so within a tolerance.
/// Each step starts from the sharded run's own parameters: errors do not compound, and the
/// tolerance is as sharp at the last step as at the first.
///
/// The tolerance is measured, not chosen. The gradient is also computed in float64 (wherever the
/// model does not itself ask for float32). The one device's relative distance from that, the
/// largest over the parameters, e = max_p |g1_p - g64_p| / |g64_p|, is what rounding does to this
/// model, on this batch, in these dtypes; the sharded run makes as many rounding errors of the same
/// sizes in another order. It then averages the parts that its W ranks and M microbatches computed,
/// with an error of at most (W + M) u times their mean magnitude, u the unit roundoff of
/// reduce_dtype. Both are relative to the parts, which are larger than their mean by the condition
/// k_p = mean_i |g_i,p| / |g_p|. So parameter p's gradient may be off by 8 k_p (e + (W + M) u)
/// |g64_p|: 8 stands for the spread between two draws of rounding errors, and a fault is larger by
/// orders of magnitude. The norm is off by no more than all gradients are (triangle inequality),
/// the loss by 8 times the root mean square of the single tokens' differences, and the roundings of
/// their mean. The optimizer's step is elementwise and has no order: from the same gradient its
/// result must have equal bits.
std::unique_ptr<Expectation> make_tolerance_expectation(const Config& config,
                                                        const DataLoader& data,
                                                        ComparedParameters compared);

}  // namespace ppfsdp::train
