#include "src/optim/adamw.h"

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcdiv.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_sqrt.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sqrt.h>

#include <cmath>
#include <map>
#include <utility>

namespace ppfsdp::optim {
namespace {

constexpr size_t kExpAvg = 0, kExpAvgSq = 1;

/// The scalars of step t, in double as Python computes them: pow(x, 0.5) and not sqrt(x), which may
/// differ in the last bit.
struct Correction {
  double step_size;
  double sqrt_second;
};
Correction correction(const AdamWOptions& options, double lr, int64_t step) {
  const auto t = static_cast<double>(step);
  const double first = 1 - std::pow(options.beta1, t);
  const double second = 1 - std::pow(options.beta2, t);
  return {lr / first, std::pow(second, 0.5)};
}

}  // namespace

AdamW::AdamW(std::vector<at::Tensor> parameters, const AdamWOptions& options)
    : Optimizer("AdamW", std::move(parameters), options.lr, options.implementation,
                {"exp_avg", "exp_avg_sq"}),
      options_(options) {
  check_option(options.eps >= 0, "eps", options.eps, "must not be negative");
  check_option(options.weight_decay >= 0, "weight_decay", options.weight_decay,
               "must not be negative");
  check_option(options.beta1 >= 0 && options.beta1 < 1, "beta1", options.beta1,
               "must be in [0, 1)");
  check_option(options.beta2 >= 0 && options.beta2 < 1, "beta2", options.beta2,
               "must be in [0, 1)");
}

void AdamW::update(Batch& batch) {
  switch (implementation()) {
    case Implementation::kSingleTensor:
      return update_single(batch);
    case Implementation::kForeach:
      return update_foreach(batch);
    case Implementation::kFused:
      return update_fused(batch);
  }
}

void AdamW::update_single(Batch& batch) const {
  const double beta1 = options_.beta1, beta2 = options_.beta2;
  for (size_t i = 0; i < batch.size(); ++i) {
    const at::Tensor &parameter = batch.parameters[i], &grad = batch.grads[i];
    const at::Tensor &exp_avg = batch.states[kExpAvg][i], &exp_avg_sq = batch.states[kExpAvgSq][i];
    if (options_.weight_decay != 0) parameter.mul_(1 - lr() * options_.weight_decay);
    exp_avg.lerp_(grad, 1 - beta1);
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, 1 - beta2);
    const auto [step_size, sqrt_second] = correction(options_, lr(), batch.steps[i]);
    const at::Tensor denominator = at::sqrt(exp_avg_sq).div_(sqrt_second).add_(options_.eps);
    parameter.addcdiv_(exp_avg, denominator, -step_size);
  }
}

void AdamW::update_foreach(Batch& batch) const {
  const double beta1 = options_.beta1, beta2 = options_.beta2;
  const at::TensorList grads = batch.grads;
  const at::TensorList exp_avgs = batch.states[kExpAvg], exp_avg_sqs = batch.states[kExpAvgSq];
  std::vector<at::Scalar> step_sizes, sqrt_seconds;
  for (const int64_t step : batch.steps) {
    const auto [step_size, sqrt_second] = correction(options_, lr(), step);
    step_sizes.emplace_back(-step_size);
    sqrt_seconds.emplace_back(sqrt_second);
  }
  if (options_.weight_decay != 0) {
    at::_foreach_mul_(batch.parameters, 1 - lr() * options_.weight_decay);
  }
  at::_foreach_lerp_(exp_avgs, grads, 1 - beta1);
  at::_foreach_mul_(exp_avg_sqs, beta2);
  at::_foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2);
  const std::vector<at::Tensor> denominators = at::_foreach_sqrt(exp_avg_sqs);
  at::_foreach_div_(denominators, sqrt_seconds);
  at::_foreach_add_(denominators, options_.eps);
  at::_foreach_addcdiv_(batch.parameters, exp_avgs, denominators, step_sizes);
}

void AdamW::update_fused(Batch& batch) const {
  // The kernel reads a step count a parameter from a float32 tensor; those at one step share it.
  std::map<int64_t, at::Tensor> by_step;
  std::vector<at::Tensor> steps;
  for (const int64_t step : batch.steps) {
    at::Tensor& tensor = by_step[step];
    if (!tensor.defined()) {
      tensor = at::full({}, static_cast<double>(step),
                        batch.parameters[0].options().dtype(at::kFloat).requires_grad(false));
    }
    steps.push_back(tensor);
  }
  at::_fused_adamw_(batch.parameters, batch.grads, batch.states[kExpAvg], batch.states[kExpAvgSq],
                    /*max_exp_avg_sqs=*/{}, steps, lr(), options_.beta1, options_.beta2,
                    options_.weight_decay, options_.eps, /*amsgrad=*/false, /*maximize=*/false);
}

}  // namespace ppfsdp::optim
