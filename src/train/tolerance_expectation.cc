#include <ATen/core/Reduction.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "src/nn/llama.h"
#include "src/train/compare.h"
#include "src/train/expectation.h"
#include "src/train/expectation_report.h"
#include "src/train/recipe.h"
#include "src/train/reference.h"
#include "src/train/schedule.h"

namespace ppfsdp::train {
namespace {

// See make_tolerance_expectation.
constexpr double kSpread = 8;

double unit_roundoff(at::ScalarType dtype) {
  if (dtype == at::kBFloat16) return std::ldexp(1.0, -8);
  if (dtype == at::kHalf) return std::ldexp(1.0, -11);
  return std::ldexp(1.0, -24);
}

double norm_of(const at::Tensor& tensor, double p) {
  return tensor.to(at::kDouble).norm(p).item<double>();
}

/// The p-norm of all elements of all tensors.
double norm_of(const std::vector<at::Tensor>& tensors, double p) {
  std::vector<at::Tensor> norms;
  for (const at::Tensor& tensor : tensors) norms.push_back(tensor.to(at::kDouble).norm(p));
  return at::stack(norms).norm(p).item<double>();
}

std::vector<at::Tensor> differences(const std::vector<at::Tensor>& a,
                                    const std::vector<at::Tensor>& b) {
  std::vector<at::Tensor> result;
  for (size_t i = 0; i < a.size(); ++i) result.push_back(a[i].to(at::kDouble).sub(b[i]));
  return result;
}

/// A loss and gradient of one step.
struct Evaluation {
  double loss = 0;
  at::Tensor token_losses;            ///< float64, one a token in the batch's order
  double grad_norm = 0;               ///< before clipping
  std::vector<at::Tensor> gradients;  ///< after it
};

/// In float64, as the mean of the parts that the ranks' microbatches are.
class Oracle {
 public:
  explicit Oracle(const Config& config)
      : config_(config), model_(make_model(config, at::kDouble)) {}

  /// Also finds the condition of each parameter's mean, and of all parameters' together in the norm
  /// of clipping.
  Evaluation evaluate(const DataLoader& data, int64_t step,
                      const std::vector<at::Tensor>& parameters) {
    load(parameters);
    const TrainingConfig& training = config_.training;
    const int ranks = static_cast<int>(config_.parallelism.ranks);
    const auto parts = static_cast<double>(ranks * training.microbatches);
    const double p = training.norm_type;
    Evaluation result;
    std::vector<at::Tensor> token_losses;
    std::vector<double> part_norms(parameters.size(), 0);
    double part_norm = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      for (int64_t microbatch = 0; microbatch < training.microbatches; ++microbatch) {
        const std::vector<at::Tensor> part =
            backward(data.batch(step, rank_rows(training, ranks, rank, microbatch)), token_losses);
        for (size_t i = 0; i < part.size(); ++i) {
          part_norms[i] += norm_of(part[i], 2) / parts;
          if (result.gradients.size() <= i) result.gradients.push_back(at::zeros_like(part[i]));
          result.gradients[i].add_(part[i], 1 / parts);
        }
        part_norm += norm_of(part, p) / parts;
      }
    }
    result.token_losses = at::cat(token_losses);
    result.loss = result.token_losses.mean().item<double>();
    result.grad_norm = norm_of(result.gradients, p);
    conditions_.clear();
    for (size_t i = 0; i < part_norms.size(); ++i) {
      const double norm = norm_of(result.gradients[i], 2);
      conditions_.push_back(norm > 0 ? part_norms[i] / norm : 1);
    }
    condition_ = result.grad_norm > 0 ? part_norm / result.grad_norm : 1;
    const double factor = std::min(1.0, clip_limit(training) / (result.grad_norm + 1e-6));
    for (at::Tensor& gradient : result.gradients) gradient.mul_(factor);
    return result;
  }

  const std::vector<double>& conditions() const { return conditions_; }
  double condition() const { return condition_; }

 private:
  void load(const std::vector<at::Tensor>& parameters) {
    const at::NoGradGuard no_grad;
    const std::vector<at::Tensor> mine = model_->parameters();
    for (size_t i = 0; i < mine.size(); ++i) mine[i].copy_(parameters[i]);
  }

  std::vector<at::Tensor> backward(const Batch& batch, std::vector<at::Tensor>& token_losses) {
    model_->zero_grad();
    const at::Tensor losses =
        at::cross_entropy_loss(model_(batch.tokens).flatten(0, 1), batch.labels.flatten(),
                               /*weight=*/{}, at::Reduction::None);
    token_losses.push_back(losses.detach());
    losses.mean().backward();
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& parameter : model_->parameters()) gradients.push_back(parameter.grad());
    return gradients;
  }

  Config config_;
  nn::Llama model_;
  std::vector<double> conditions_;
  double condition_ = 1;
};

class ToleranceExpectation : public Expectation {
 public:
  ToleranceExpectation(const Config& config, const DataLoader& data, ComparedParameters compared)
      : config_(config),
        data_(data),
        compared_(std::move(compared)),
        policy_(mixed_precision(config.training)),
        oracle_(config),
        model_(make_model(config)),
        reference_(
            {model_.get()},
            {.world = 1, .param_dtype = policy_.param_dtype, .reduce_dtype = policy_.reduce_dtype}),
        optimizer_(make_optimizer(config, model_->parameters())) {}

  StepVerdict judge(const StepResult& sharded, const std::vector<at::Tensor>& gradients,
                    const std::vector<at::Tensor>& parameters) override {
    StepVerdict verdict;
    verdict.sharded = sharded;
    const DifferenceReport report(compared_, sharded.step, verdict.first_difference);
    const Evaluation oracle = oracle_.evaluate(data_, sharded.step, model_->parameters());
    const Evaluation device = evaluate(sharded.step);
    verdict.expected_loss = device.loss;
    verdict.expected_grad_norm = device.grad_norm;
    judge_loss(sharded, oracle, device, report, verdict);
    judge_gradients(gradients, oracle, device, report, verdict);
    judge_norm(sharded, oracle, device, report, verdict);
    judge_optimizer(sharded.step, gradients, parameters, report, verdict);
    return verdict;
  }

 private:
  /// In the run's own dtypes, over the whole batch at once, from the model's parameters.
  Evaluation evaluate(int64_t step) {
    Evaluation result;
    optimizer_->zero_grad();
    const auto losses = reference_.backward(1, [&](int, int) {
      const Batch batch = data_.batch(step, {0, config_.training.global_batch});
      const at::Tensor logits = model_(batch.tokens).to(at::kFloat).flatten(0, 1);
      const at::Tensor token_losses = at::cross_entropy_loss(logits, batch.labels.flatten(),
                                                             /*weight=*/{}, at::Reduction::None);
      result.token_losses = token_losses.detach().to(at::kDouble);
      return token_losses.mean();
    });
    result.loss = losses.at(0).at(0);
    result.grad_norm =
        reference_.clip_grad_norm_(clip_limit(config_.training), config_.training.norm_type,
                                   config_.training.reproducible_norm);
    for (const at::Tensor& parameter : model_->parameters()) {
      result.gradients.push_back(parameter.grad());
    }
    return result;
  }

  /// Roundings that the mean over ranks and microbatches makes, relative to their mean magnitude.
  double averaging_error() const {
    const double terms =
        static_cast<double>(config_.parallelism.ranks + config_.training.microbatches);
    return terms * unit_roundoff(policy_.reduce_dtype.value_or(at::kFloat));
  }

  void judge_loss(const StepResult& sharded, const Evaluation& oracle, const Evaluation& device,
                  const DifferenceReport& report, StepVerdict& verdict) const {
    const auto tokens = static_cast<double>(oracle.token_losses.numel());
    const double spread =
        norm_of(device.token_losses.sub(oracle.token_losses), 2) / std::sqrt(tokens);
    const double terms =
        std::ceil(std::log2(tokens)) +
        static_cast<double>(config_.parallelism.ranks + config_.training.microbatches);
    verdict.allowed_loss =
        kSpread * spread + terms * unit_roundoff(at::kFloat) * std::abs(oracle.loss);
    report.number("the loss", sharded.loss, oracle.loss, verdict.allowed_loss);
  }

  void judge_gradients(const std::vector<at::Tensor>& gradients, const Evaluation& oracle,
                       const Evaluation& device, const DifferenceReport& report,
                       StepVerdict& verdict) const {
    std::vector<double> norms;
    double rounding = 0;
    for (size_t i = 0; i < gradients.size(); ++i) {
      const at::Tensor& exact = oracle.gradients[i];
      norms.push_back(norm_of(exact, 2));
      if (norms[i] == 0) continue;
      rounding = std::max(rounding, norm_of(device.gradients[i].sub(exact), 2) / norms[i]);
    }
    for (size_t i = 0; i < gradients.size(); ++i) {
      const double off = norm_of(gradients[i].sub(oracle.gradients[i]), 2);
      const double allowed =
          kSpread * oracle_.conditions()[i] * (rounding + averaging_error()) * norms[i];
      const double share = off == 0 ? 0 : off / allowed;
      verdict.gradient_share = std::max(verdict.gradient_share, share);
      const TensorDifference bits = compare_bits(gradients[i], device.gradients[i]);
      verdict.gradient_ulps = std::max(verdict.gradient_ulps, bits.max_ulps);
      verdict.gradient_abs = std::max(verdict.gradient_abs, bits.max_abs);
      // Written so that a NaN fails.
      if (!(off <= allowed))
        report.note(
            gradient_sentence(i, gradients[i], oracle.gradients[i], off, allowed, norms[i]));
    }
  }

  std::string gradient_sentence(size_t index, const at::Tensor& got, const at::Tensor& exact,
                                double off, double allowed, double norm) const {
    // Where it is worst; a NaN counts as worst.
    const at::Tensor apart = got.sub(exact).abs().flatten().nan_to_num(HUGE_VAL);
    const int64_t worst = apart.argmax().item<int64_t>();
    return fmt::format(
        "the gradient of {} is {:.2g} of its norm off, {:.2g} allowed; most on rank {} at {}: {} "
        "sharded, {} on one device",
        compared_.names[index], off / norm, allowed / norm,
        rank_of_element(compared_.sharded[index], worst), coordinates(got.sizes(), worst),
        got.flatten()[worst].item<float>(), exact.flatten()[worst].item<double>());
  }

  void judge_norm(const StepResult& sharded, const Evaluation& oracle, const Evaluation& device,
                  const DifferenceReport& report, StepVerdict& verdict) const {
    const double p = config_.training.norm_type;
    const double clipped = norm_of(oracle.gradients, p);
    const double rounding =
        clipped > 0 ? norm_of(differences(device.gradients, oracle.gradients), p) / clipped : 0;
    double elements = 0;
    for (const at::Tensor& gradient : oracle.gradients) {
      elements += static_cast<double>(gradient.numel());
    }
    // The norm's own sum, beside the errors of what it sums.
    const double summing = (std::ceil(std::log2(elements)) + 1) * unit_roundoff(at::kFloat);
    verdict.allowed_grad_norm =
        (kSpread * oracle_.condition() * (rounding + averaging_error()) + summing) *
        oracle.grad_norm;
    report.number("the gradient's norm", sharded.grad_norm, oracle.grad_norm,
                  verdict.allowed_grad_norm);
  }

  /// From the sharded run's gradients the optimizer must give its parameters, which the next step
  /// starts from.
  void judge_optimizer(int64_t step, const std::vector<at::Tensor>& gradients,
                       const std::vector<at::Tensor>& parameters, const DifferenceReport& report,
                       StepVerdict& verdict) {
    const std::vector<at::Tensor> mine = model_->parameters();
    for (size_t i = 0; i < mine.size(); ++i) mine[i].mutable_grad() = gradients[i].clone();
    optimizer_->set_lr(learning_rate(config_.optimizer, config_.training.steps, step));
    optimizer_->step();
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < mine.size(); ++i) {
      report.tensor("the parameter", i, parameters[i], mine[i].detach(), verdict.parameter_ulps,
                    verdict.parameter_abs);
      mine[i].copy_(parameters[i]);
    }
  }

  Config config_;
  const DataLoader& data_;
  ComparedParameters compared_;
  fsdp::MixedPrecisionPolicy policy_;
  Oracle oracle_;
  nn::Llama model_;
  ReferenceTrainer reference_;
  std::unique_ptr<optim::Optimizer> optimizer_;
};

}  // namespace

std::unique_ptr<Expectation> make_tolerance_expectation(const Config& config,
                                                        const DataLoader& data,
                                                        ComparedParameters compared) {
  return std::make_unique<ToleranceExpectation>(config, data, std::move(compared));
}

}  // namespace ppfsdp::train
