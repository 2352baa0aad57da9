#include "backends/nccl/gpu/training.h"

#include <ATen/core/Generator.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/randint.h>

#include "src/dtensor/dtensor.h"
#include "src/mesh/device_mesh.h"
#include "src/nn/loss.h"
#include "src/nn/to_empty.h"
#include "src/optim/adamw.h"
#include "src/optim/clip_grad_norm.h"

namespace ppfsdp::nccl::testing {

Training::Training(const TrainingOptions& options, comm::Runtime& runtime)
    : model_(options.model, at::kMeta) {
  const fsdp::FullyShardOptions sharding = {
      .mesh = mesh::DeviceMesh::create(runtime, {runtime.world_size()}),
      .mp_policy = options.policy};
  const auto shard = [&](nn::Module& module) {
    fsdp::fully_shard(module, sharding)
        .set_allocate_memory_from_process_group_for_comm(options.registered_memory);
  };
  for (nn::LlamaBlock& block : model_->blocks()) shard(*block);
  shard(*model_);

  const at::NoGradGuard no_grad;
  nn::to_empty(*model_, runtime.device());
  model_->reset_parameters();  // the rotary table
  at::Generator generator = runtime.default_generator();
  generator.set_current_seed(static_cast<uint64_t>(runtime.rank()));
  for (const at::Tensor& parameter : model_->parameters()) {
    at::Tensor part = dtensor::local_of(parameter);
    part.normal_(/*mean=*/0, /*std=*/0.02, generator);
  }
  const at::TensorOptions ids = at::TensorOptions(runtime.device()).dtype(at::kLong);
  const std::vector<int64_t> sizes = {options.batch, options.model.max_seq_len};
  tokens_ = at::randint(options.model.vocab_size, sizes, generator, ids);
  labels_ = at::randint(options.model.vocab_size, sizes, generator, ids);
  optimizer_ = std::make_unique<optim::AdamW>(
      model_->parameters(),
      optim::AdamWOptions{
          .lr = 1e-4, .beta2 = 0.95, .weight_decay = 0.1, .implementation = options.optimizer});
}

void Training::forward() {
  optimizer_->zero_grad();
  loss_ = nn::next_token_loss(model_(tokens_), labels_);
}

void Training::backward() {
  loss_.backward();
  loss_ = loss_.detach();
}

void Training::clip() { grad_norm_ = optim::clip_grad_norm_(parameters(), /*max_norm=*/1.0); }

void Training::optimize() { optimizer_->step(); }

void Training::step() {
  forward();
  backward();
  clip();
  optimize();
}

}  // namespace ppfsdp::nccl::testing
