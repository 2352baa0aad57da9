#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "src/comm/runtime.h"
#include "src/fsdp/fully_shard.h"
#include "src/nn/llama.h"
#include "src/nn/llama_config.h"
#include "src/optim/optimizer.h"

namespace ppfsdp::nccl::testing {

struct TrainingOptions {
  nn::LlamaConfig model;
  fsdp::MixedPrecisionPolicy policy = {};
  /// Sequences of a rank's batch. They are as long as model.max_seq_len.
  int64_t batch = 1;
  optim::Implementation optimizer = optim::Implementation::kFused;
  /// FSDPModule::set_allocate_memory_from_process_group_for_comm.
  bool registered_memory = false;
};

/// One rank's end of training a Llama on one batch, without data, logging or anything else that
/// reads a value: what a step itself costs. fully_shard is on each block and then on the model; the
/// optimizer is AdamW. Initial values are drawn by each rank for its own part, and tokens too, from
/// a seed that is the rank.
class Training {
 public:
  Training(const TrainingOptions& options, comm::Runtime& runtime);

  /// The parts of a step, in their order. None waits for the device.
  void forward();
  void backward();
  void clip();
  void optimize();

  /// All of them.
  void step();

  /// Of the last step, on the device.
  const at::Tensor& loss() const { return loss_; }
  const at::Tensor& grad_norm() const { return grad_norm_; }
  /// The sharded parameters.
  const std::vector<at::Tensor>& parameters() const { return optimizer_->parameters(); }

 private:
  nn::Llama model_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  at::Tensor tokens_, labels_;
  at::Tensor loss_, grad_norm_;
};

}  // namespace ppfsdp::nccl::testing
