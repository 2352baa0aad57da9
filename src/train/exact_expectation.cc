#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <utility>

#include "src/nn/llama.h"
#include "src/nn/loss.h"
#include "src/train/compare.h"
#include "src/train/expectation.h"
#include "src/train/expectation_report.h"
#include "src/train/recipe.h"
#include "src/train/reference.h"
#include "src/train/schedule.h"

namespace ppfsdp::train {
namespace {

ReferenceTrainer make_reference(const Config& config, nn::Llama& model,
                                comm::ReductionOrder order) {
  const fsdp::MixedPrecisionPolicy policy = mixed_precision(config.training);
  std::vector<nn::Module*> groups;
  for (nn::LlamaBlock& block : model->blocks()) groups.push_back(block.get());
  groups.push_back(model.get());
  return ReferenceTrainer(groups, {.world = static_cast<int>(config.parallelism.ranks),
                                   .order = order,
                                   .param_dtype = policy.param_dtype,
                                   .reduce_dtype = policy.reduce_dtype});
}

class ExactExpectation : public Expectation {
 public:
  ExactExpectation(const Config& config, const DataLoader& data, comm::ReductionOrder order,
                   ComparedParameters compared)
      : config_(config),
        data_(data),
        compared_(std::move(compared)),
        model_(make_model(config)),
        reference_(make_reference(config, model_, order)),
        optimizer_(make_optimizer(config, reference_.parameters())) {}

  StepVerdict judge(const StepResult& sharded, const std::vector<at::Tensor>& gradients,
                    const std::vector<at::Tensor>& parameters) override {
    StepVerdict verdict;
    verdict.sharded = sharded;
    const std::vector<double> rank_losses = forward_and_backward(sharded.step);
    verdict.expected_grad_norm =
        reference_.clip_grad_norm_(clip_limit(config_.training), config_.training.norm_type,
                                   config_.training.reproducible_norm);
    const DifferenceReport report(compared_, sharded.step, verdict.first_difference);
    for (size_t rank = 0; rank < rank_losses.size(); ++rank) {
      verdict.expected_loss += rank_losses[rank];
      report.number(fmt::format("the loss of rank {}", rank), sharded.rank_losses.at(rank),
                    rank_losses[rank]);
    }
    verdict.expected_loss /= static_cast<double>(rank_losses.size());
    // The norm is of the gradients before clipping, so a gradient that differs explains it.
    const std::vector<at::Tensor> mine = model_->parameters();
    for (size_t i = 0; i < mine.size(); ++i) {
      report.tensor("the gradient", i, gradients.at(i), mine[i].grad(), verdict.gradient_ulps,
                    verdict.gradient_abs);
    }
    report.number("the gradient's norm", sharded.grad_norm, verdict.expected_grad_norm);
    optimizer_->set_lr(learning_rate(config_.optimizer, config_.training.steps, sharded.step));
    optimizer_->step();
    for (size_t i = 0; i < mine.size(); ++i) {
      report.tensor("the parameter", i, parameters.at(i), mine[i].detach(), verdict.parameter_ulps,
                    verdict.parameter_abs);
    }
    return verdict;
  }

 private:
  /// The loss of each rank.
  std::vector<double> forward_and_backward(int64_t step) {
    const TrainingConfig& training = config_.training;
    optimizer_->zero_grad();
    const auto losses =
        reference_.backward(static_cast<int>(training.microbatches), [&](int rank, int microbatch) {
          const Batch batch = data_.batch(
              step,
              rank_rows(training, static_cast<int>(config_.parallelism.ranks), rank, microbatch));
          return nn::next_token_loss(model_(batch.tokens), batch.labels).div(training.microbatches);
        });
    std::vector<double> sums;
    for (const std::vector<double>& microbatches : losses) {
      double sum = 0;
      for (const double loss : microbatches) sum += loss;
      sums.push_back(sum);
    }
    return sums;
  }

  Config config_;
  const DataLoader& data_;
  ComparedParameters compared_;
  nn::Llama model_;
  ReferenceTrainer reference_;
  std::unique_ptr<optim::Optimizer> optimizer_;
};

}  // namespace

std::unique_ptr<Expectation> make_exact_expectation(const Config& config, const DataLoader& data,
                                                    comm::ReductionOrder order,
                                                    ComparedParameters compared) {
  return std::make_unique<ExactExpectation>(config, data, order, std::move(compared));
}

}  // namespace ppfsdp::train
