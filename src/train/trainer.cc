#include "src/train/trainer.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <chrono>

#include "src/nn/loss.h"
#include "src/optim/clip_grad_norm.h"
#include "src/train/recipe.h"
#include "src/train/schedule.h"

namespace ppfsdp::train {
namespace {

using Clock = std::chrono::steady_clock;

/// Every rank's pair of values, in rank order: sums over it have the same bits on every backend.
at::Tensor gather_pairs(comm::Runtime& runtime, double first, double second) {
  const at::Tensor mine = at::empty({2}, at::kDouble);
  mine.data_ptr<double>()[0] = first;
  mine.data_ptr<double>()[1] = second;
  const at::Tensor all = at::empty({runtime.world_size(), 2}, at::kDouble);
  comm::Stream& stream = runtime.compute_stream();
  runtime.world()->all_gather_into(all, mine, stream);
  stream.synchronize();
  return all;
}

}  // namespace

Trainer::Trainer(const Config& config, const DataLoader& data, comm::Runtime& runtime)
    : config_(config), data_(data), runtime_(runtime), model_(make_meta_model(config)) {
  if (config.communication.backend != "single") fsdp_ = shard(config, model_, runtime);
  load_report_ = initialize(config, model_, runtime);
  optimizer_ = make_optimizer(config, model_->parameters());
}

StepResult Trainer::step(int64_t step, const std::atomic<int>* stop_signal) {
  const Clock::time_point start = Clock::now();
  StepResult result;
  result.step = step;
  optimizer_->zero_grad();
  const double loss = forward_and_backward(step);
  result.grad_norm = optim::clip_grad_norm_(optimizer_->parameters(), clip_limit(config_.training),
                                            {.norm_type = config_.training.norm_type,
                                             .reproducible = config_.training.reproducible_norm})
                         .item<double>();
  result.lr = learning_rate(config_.optimizer, config_.training.steps, step);
  optimizer_->set_lr(result.lr);
  optimizer_->step();

  const at::Tensor pairs =
      gather_pairs(runtime_, loss, stop_signal == nullptr ? 0 : stop_signal->load());
  const double* values = pairs.const_data_ptr<double>();
  for (int rank = 0; rank < runtime_.world_size(); ++rank) {
    result.rank_losses.push_back(values[2 * rank]);
    result.loss += values[2 * rank];
    result.stop_signal = std::max(result.stop_signal, static_cast<int>(values[2 * rank + 1]));
  }
  result.loss /= runtime_.world_size();
  result.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  return result;
}

double Trainer::forward_and_backward(int64_t step) {
  const int64_t microbatches = config_.training.microbatches;
  double total = 0;
  for (int64_t microbatch = 0; microbatch < microbatches; ++microbatch) {
    if (fsdp_) fsdp_->set_requires_gradient_sync(microbatch + 1 == microbatches);
    const Batch batch = data_.batch(
        step, rank_rows(config_.training, runtime_.world_size(), runtime_.rank(), microbatch));
    const at::Tensor loss =
        nn::next_token_loss(model_(batch.tokens), batch.labels).div(microbatches);
    loss.backward();
    total += loss.item<double>();
  }
  return total;
}

StepResult train(Trainer& trainer, int64_t steps, const TrainOptions& options) {
  StepResult result;
  for (int64_t step = 0; step < steps && result.stop_signal == 0; ++step) {
    result = trainer.step(step, options.stop_signal);
    if (options.on_step) options.on_step(result);
  }
  return result;
}

}  // namespace ppfsdp::train
