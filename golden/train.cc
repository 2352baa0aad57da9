#include "golden/train.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <functional>
#include <memory>
#include <numeric>

#include "src/dtensor/dtensor.h"
#include "src/fsdp/fully_shard.h"
#include "src/mesh/device_mesh.h"
#include "src/nn/llama.h"
#include "src/nn/loss.h"
#include "src/optim/adamw.h"
#include "src/optim/clip_grad_norm.h"
#include "src/optim/sgd.h"
#include "src/train/reference.h"

namespace ppfsdp::golden {
namespace {

nn::Llama make_model(const Case& config, const Inputs& inputs) {
  nn::Llama model(config.model());
  at::NoGradGuard no_grad;
  for (auto& item : model->named_parameters()) {
    item.value().copy_(inputs.init.at(item.key()));
    if (!config.frozen.empty() && item.key().find(config.frozen) != std::string::npos) {
      item.value().set_requires_grad(false);
    }
  }
  return model;
}

std::unique_ptr<optim::Optimizer> make_optimizer(const Case& config,
                                                 std::vector<at::Tensor> parameters) {
  const auto implementation =
      config.foreach ? optim::Implementation::kForeach : optim::Implementation::kSingleTensor;
  if (config.optimizer == "sgd") {
    return std::make_unique<optim::SGD>(
        std::move(parameters),
        optim::SGDOptions{.lr = config.lr, .momentum = 0.9, .implementation = implementation});
  }
  return std::make_unique<optim::AdamW>(
      std::move(parameters),
      optim::AdamWOptions{.lr = config.lr, .weight_decay = 0.1, .implementation = implementation});
}

std::vector<at::Tensor> trained(const nn::Llama& model) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& parameter : model->parameters()) {
    if (parameter.requires_grad()) result.push_back(parameter);
  }
  return result;
}

/// What differs between the two ways to run a case.
struct Run {
  nn::Llama model;
  std::vector<at::Tensor> parameters;
  /// All microbatches of a step; each rank's sum of losses that this process has.
  std::function<std::vector<double>(int64_t step)> backward;
  std::function<double()> clip;
  /// Of every rank.
  std::function<std::vector<double>(const std::vector<double>&)> gather_losses;
  std::function<at::Tensor(const at::Tensor&)> full;
};

Outputs train(const Case& config, const Inputs& inputs, Run& run, bool values) {
  using Clock = std::chrono::steady_clock;
  const auto optimizer = make_optimizer(config, run.parameters);
  const auto copy = [&](const at::Tensor& tensor) {
    at::NoGradGuard no_grad;
    return run.full(tensor.detach())
        .to(at::kCPU, tensor.scalar_type(), /*non_blocking=*/false,
            /*copy=*/true);
  };
  Outputs outputs;
  const auto steps = static_cast<int64_t>(inputs.tokens.size());
  for (int64_t step = 0; step < steps; ++step) {
    const Clock::time_point start = Clock::now();
    optimizer->zero_grad();
    const std::vector<double> losses = run.backward(step);
    std::optional<double> norm;
    if (config.clip != 0) norm = run.clip();
    optimizer->step();
    outputs.step_ms.push_back(
        std::chrono::duration<double, std::milli>(Clock::now() - start).count());
    if (!values) continue;
    const std::vector<double> all = run.gather_losses(losses);
    const double sum = std::accumulate(all.begin(), all.end(), 0.0);
    outputs.steps.push_back(
        {.loss = sum / static_cast<double>(all.size()), .loss_per_rank = all, .grad_norm = norm});
    if (step != 0 && step != steps - 1) continue;
    for (const auto& item : run.model->named_parameters()) {
      const at::Tensor& grad = item.value().grad();
      if (grad.defined()) outputs.grads[step][item.key()] = copy(grad);
    }
  }
  if (!values) return outputs;
  for (const auto& item : run.model->named_parameters()) {
    outputs.final[item.key()] = copy(item.value());
  }
  return outputs;
}

at::Tensor microbatch_loss(const Case& config, nn::Llama& model, const Inputs& inputs, int64_t step,
                           int64_t microbatch, int64_t rank) {
  const at::Device device = model->table.device();
  const auto of_rank = [&](const std::vector<at::Tensor>& ids) {
    return ids[step][microbatch][rank].to(device);
  };
  const at::Tensor logits = model(of_rank(inputs.tokens));
  return nn::next_token_loss(logits, of_rank(inputs.labels)) / config.accumulate;
}

fsdp::FullyShardOptions shard_options(const Case& config, comm::Runtime& runtime) {
  fsdp::FullyShardOptions options;
  options.mesh = mesh::DeviceMesh::create(runtime, {runtime.world_size()});
  options.mp_policy = {.param_dtype = config.param_dtype, .reduce_dtype = config.reduce_dtype};
  if (const bool* after_forward = std::get_if<bool>(&config.reshard)) {
    options.reshard_after_forward = *after_forward;
  } else {
    options.reshard_after_forward = static_cast<int>(std::get<int64_t>(config.reshard));
  }
  return options;
}

}  // namespace

Outputs train_sharded(const Case& config, const Inputs& inputs, comm::Runtime& runtime,
                      bool values) {
  TORCH_CHECK(runtime.world_size() == config.world, "the case needs ", config.world,
              " ranks; there are ", runtime.world_size());
  Run run{.model = make_model(config, inputs)};
  const fsdp::FullyShardOptions options = shard_options(config, runtime);
  for (nn::LlamaBlock& block : run.model->blocks()) fsdp::fully_shard(*block, options);
  fsdp::FSDPModule root = fsdp::fully_shard(*run.model, options);
  run.parameters = trained(run.model);
  run.backward = [&](int64_t step) {
    double sum = 0;
    for (int64_t microbatch = 0; microbatch < config.accumulate; ++microbatch) {
      if (config.accumulate > 1) {
        root.set_requires_gradient_sync(microbatch == config.accumulate - 1);
      }
      const at::Tensor loss =
          microbatch_loss(config, run.model, inputs, step, microbatch, runtime.rank());
      loss.backward();
      sum += loss.item<double>();
    }
    return std::vector<double>{sum};
  };
  run.clip = [&] {
    return optim::clip_grad_norm_(run.parameters, config.clip, config.norm_type,
                                  /*error_if_nonfinite=*/false, config.foreach)
        .item<double>();
  };
  run.gather_losses = [&](const std::vector<double>& mine) {
    const at::TensorOptions options = at::TensorOptions(runtime.device()).dtype(at::kDouble);
    const at::Tensor input = at::full({1}, mine[0], options);
    const at::Tensor all = at::empty({config.world}, options);
    runtime.world()->all_gather_into(all, input, runtime.compute_stream());
    runtime.compute_stream().synchronize();
    const at::Tensor host = all.cpu();
    return std::vector<double>(host.const_data_ptr<double>(),
                               host.const_data_ptr<double>() + config.world);
  };
  run.full = [](const at::Tensor& tensor) { return dtensor::full_tensor(tensor); };
  return train(config, inputs, run, values);
}

Outputs train_single(const Case& config, const Inputs& inputs, comm::ReductionOrder order,
                     bool values) {
  Run run{.model = make_model(config, inputs)};
  std::vector<nn::Module*> groups;
  for (nn::LlamaBlock& block : run.model->blocks()) groups.push_back(block.get());
  groups.push_back(run.model.get());
  train::ReferenceTrainer trainer(groups, {.world = static_cast<int>(config.world),
                                           .order = order,
                                           .param_dtype = config.param_dtype,
                                           .reduce_dtype = config.reduce_dtype});
  run.parameters = trainer.parameters();
  run.backward = [&](int64_t step) {
    std::vector<double> sums;
    const auto loss = [&](int rank, int microbatch) {
      return microbatch_loss(config, run.model, inputs, step, microbatch, rank);
    };
    for (const std::vector<double>& losses :
         trainer.backward(static_cast<int>(config.accumulate), loss)) {
      sums.push_back(std::accumulate(losses.begin(), losses.end(), 0.0));
    }
    return sums;
  };
  run.clip = [&] { return trainer.clip_grad_norm_(config.clip, config.norm_type); };
  run.gather_losses = [](const std::vector<double>& all) { return all; };
  run.full = [](const at::Tensor& tensor) { return tensor; };
  return train(config, inputs, run, values);
}

}  // namespace ppfsdp::golden
