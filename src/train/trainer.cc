#include "src/train/trainer.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>

#include "src/nn/loss.h"
#include "src/optim/clip_grad_norm.h"
#include "src/train/memory_need.h"
#include "src/train/recipe.h"
#include "src/train/schedule.h"

namespace ppfsdp::train {
namespace {

using Clock = std::chrono::steady_clock;

/// `tensor` where the host can read it, once `stream`, and so what was computed before, is done.
at::Tensor read(const at::Tensor& tensor, comm::Stream& stream) {
  const at::Tensor host = at::empty(
      tensor.sizes(), at::TensorOptions(tensor.scalar_type()).pinned_memory(tensor.is_cuda()));
  host.copy_(tensor, /*non_blocking=*/true);
  stream.record()->synchronize();
  return host;
}

}  // namespace

Trainer::Trainer(const Config& config, const DataLoader& data, comm::Runtime& runtime)
    : config_(config), data_(data), runtime_(runtime), model_(make_meta_model(config)) {
  if (const std::string refusal = refuse_device_memory(config, runtime); !refusal.empty()) {
    throw std::runtime_error(refusal);
  }
  if (config.communication.backend != "single") fsdp_ = shard(config, model_, runtime);
  load_report_ = initialize(config, model_, runtime);
  optimizer_ = make_optimizer(config, model_->parameters());
}

StepResult Trainer::step(int64_t step, const std::atomic<int>* stop_signal) {
  const Clock::time_point start = Clock::now();
  StepResult result;
  result.step = step;
  optimizer_->zero_grad();
  const at::Tensor loss = forward_and_backward(step);
  const at::Tensor norm =
      optim::clip_grad_norm_(optimizer_->parameters(), clip_limit(config_.training),
                             {.norm_type = config_.training.norm_type,
                              .reproducible = config_.training.reproducible_norm});
  result.lr = learning_rate(config_.optimizer, config_.training.steps, step);
  optimizer_->set_lr(result.lr);
  optimizer_->step();

  // Every rank's loss and signal, in rank order: sums over them have the same bits on every
  // backend.
  const at::Tensor signal =
      at::full({}, stop_signal == nullptr ? 0 : stop_signal->load(), loss.options());
  const int64_t world = runtime_.world_size();
  const at::Tensor pairs = at::empty({world, 2}, loss.options());
  comm::Stream& stream = runtime_.compute_stream();
  runtime_.world()->all_gather_into(pairs, at::stack({loss, signal}), stream);
  const at::Tensor all =
      read(at::cat({pairs.flatten(), norm.to(loss.options()).reshape({1})}), stream);
  const double* values = all.const_data_ptr<double>();
  for (int64_t rank = 0; rank < world; ++rank) {
    result.rank_losses.push_back(values[2 * rank]);
    result.loss += values[2 * rank];
    result.stop_signal = std::max(result.stop_signal, static_cast<int>(values[2 * rank + 1]));
  }
  result.grad_norm = values[2 * world];
  result.loss /= runtime_.world_size();
  result.memory = runtime_.memory_use();
  result.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  return result;
}

/// Of this rank's part of the batch, in double; on the device, since the host would have to wait.
at::Tensor Trainer::forward_and_backward(int64_t step) {
  const int64_t microbatches = config_.training.microbatches;
  const at::Tensor total = at::zeros({}, at::TensorOptions(at::kDouble).device(runtime_.device()));
  for (int64_t microbatch = 0; microbatch < microbatches; ++microbatch) {
    if (fsdp_) fsdp_->set_requires_gradient_sync(microbatch + 1 == microbatches);
    const RowRange rows =
        rank_rows(config_.training, runtime_.world_size(), runtime_.rank(), microbatch);
    const Batch batch = data_.batch(step, rows, runtime_.device());
    const at::Tensor loss =
        nn::next_token_loss(model_(batch.tokens), batch.labels).div(microbatches);
    loss.backward();
    total.add_(loss.detach());
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
