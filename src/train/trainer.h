#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "src/checkpoint/load_weights.h"
#include "src/comm/runtime.h"
#include "src/fsdp/fully_shard.h"
#include "src/nn/llama.h"
#include "src/optim/optimizer.h"
#include "src/train/config.h"
#include "src/train/data_loader.h"

namespace ppfsdp::train {

/// What one step did; the same on every rank but for `seconds` and `memory`.
struct StepResult {
  int64_t step = 0;                 ///< counted from 0
  double loss = 0;                  ///< mean over the global batch
  std::vector<double> rank_losses;  ///< mean over each rank's part of it
  double grad_norm = 0;             ///< of the averaged gradient, before clipping
  double lr = 0;                    ///< that the step used
  double seconds = 0;
  comm::MemoryUse memory;  ///< of this rank's device, at the end of the step
  /// The number of a signal that asks to stop, which some rank saw by the end of the step; 0: none.
  int stop_signal = 0;
};

/// One rank's end of training a Config: the model, built on meta, fully_shard on each block and
/// then the root (with backend "single": on none), memory and values for this rank's part, the
/// optimizer, and a step.
class Trainer {
 public:
  /// Every rank of `runtime`'s world makes one. `data` and `runtime` must outlive it. `config` must
  /// have passed check_config. Throws std::runtime_error when a GPU has too little memory for its
  /// share (see refuse_memory), before it takes any.
  Trainer(const Config& config, const DataLoader& data, comm::Runtime& runtime);

  /// Step number `step` (counted from 0) on its global batch: forward and backward of this rank's
  /// microbatches, of which the last reduces the gradients; clipping; the optimizer at the
  /// schedule's rate. Afterwards the parameters' gradients are the clipped ones. `stop_signal` is
  /// this rank's view; the ranks agree on the result's.
  ///
  /// The host runs ahead of the device through all of that, and waits for it once, at the end, to
  /// read the loss and the norm.
  StepResult step(int64_t step, const std::atomic<int>* stop_signal = nullptr);

  nn::Llama& model() { return model_; }
  /// What loading model.weights reported.
  const checkpoint::LoadReport& load_report() const { return load_report_; }
  optim::Optimizer& optimizer() { return *optimizer_; }

 private:
  at::Tensor forward_and_backward(int64_t step);

  Config config_;
  const DataLoader& data_;
  comm::Runtime& runtime_;
  nn::Llama model_ = nullptr;
  checkpoint::LoadReport load_report_;
  std::optional<fsdp::FSDPModule> fsdp_;
  std::unique_ptr<optim::Optimizer> optimizer_;
};

struct TrainOptions {
  /// Becomes a signal's number when training should end after the step in progress.
  const std::atomic<int>* stop_signal = nullptr;
  /// Called after each step.
  std::function<void(const StepResult&)> on_step;
};

/// Runs steps 0 to training.steps - 1, or until a rank is asked to stop: then all ranks end after
/// the same step. Returns the last step's result.
StepResult train(Trainer& trainer, int64_t steps, const TrainOptions& options);

}  // namespace ppfsdp::train
