#include "src/train/recipe.h"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "src/comm/single_runtime.h"
#include "src/mesh/device_mesh.h"
#include "src/nn/to_empty.h"
#include "src/optim/adamw.h"
#include "src/optim/sgd.h"
#include "src/train/config_error.h"
#include "src/train/data_loader.h"
#include "src/train/schedule.h"

namespace ppfsdp::train {
namespace {

std::optional<at::ScalarType> reduced_dtype(const std::string& name) {
  if (name == "bfloat16") return at::kBFloat16;
  if (name == "float16") return at::kHalf;
  return std::nullopt;
}

checkpoint::LoadReport load_weights(const ModelConfig& config, nn::Module& model,
                                    comm::Runtime& runtime) {
  if (config.weights.empty()) return {};
  const auto reader = config.weights_reader == "rank_zero" ? checkpoint::WeightsReader::kRankZero
                                                           : checkpoint::WeightsReader::kEveryRank;
  try {
    return checkpoint::load_weights(model, config.weights, runtime, {.reader = reader});
  } catch (const c10::Error& error) {
    throw ConfigError(
        fmt::format("model.weights = \"{}\": {}", config.weights, error.what_without_backtrace()));
  }
}

template <typename Value>
void override_with(const std::optional<Value>& given, Value& value) {
  if (given) value = *given;
}

}  // namespace

nn::LlamaConfig model_config(const Config& config) {
  const ModelConfig& model = config.model;
  try {
    nn::LlamaConfig llama = nn::llama_config(model.name);
    override_with(model.dim, llama.dim);
    override_with(model.layers, llama.n_layers);
    override_with(model.heads, llama.n_heads);
    override_with(model.kv_heads, llama.n_kv_heads);
    override_with(model.hidden, llama.hidden_dim);
    override_with(model.vocab, llama.vocab_size);
    override_with(model.rope_theta, llama.rope_theta);
    override_with(model.tied, llama.tied_output);
    llama.max_seq_len = config.data.seq_len;
    llama.validate();
    return llama;
  } catch (const c10::Error& error) {
    throw ConfigError(fmt::format("[model]: {}", error.what_without_backtrace()));
  }
}

void check_config(const Config& config) {
  model_config(config);
  try {
    make_optimizer(config, {at::zeros({1})});
  } catch (const c10::Error& error) {
    throw ConfigError(fmt::format("[optimizer]: {}", error.what_without_backtrace()));
  }
  const int ranks = static_cast<int>(config.parallelism.ranks);
  rank_rows(config.training, ranks, 0, 0);
  const int* kept = std::get_if<int>(&config.parallelism.reshard_after_forward);
  if (kept != nullptr && ranks % *kept != 0) {
    throw ConfigError(fmt::format(
        "parallelism.reshard_after_forward = {} does not divide the {} ranks", *kept, ranks));
  }
  const fsdp::MixedPrecisionPolicy policy = mixed_precision(config.training);
  if (config.communication.backend == "single" && (policy.param_dtype || policy.reduce_dtype)) {
    throw ConfigError(
        "training.param_dtype and training.reduce_dtype must be \"float32\" with "
        "communication.backend = \"single\": mixed precision is part of the sharding");
  }
  if (config.communication.backend == "nccl" && config.training.reproducible_norm) {
    throw ConfigError(
        "training.reproducible_norm = true is for gradients on the CPU; set it to false with "
        "communication.backend = \"nccl\"");
  }
}

nn::Llama make_meta_model(const Config& config) {
  return nn::Llama(model_config(config), at::kMeta);
}

fsdp::FSDPModule shard(const Config& config, nn::Llama& model, comm::Runtime& runtime) {
  fsdp::FullyShardOptions options;
  options.mesh = mesh::DeviceMesh::create(runtime, {runtime.world_size()}, {"shard"});
  options.reshard_after_forward = config.parallelism.reshard_after_forward;
  options.mp_policy = mixed_precision(config.training);
  for (nn::LlamaBlock& block : model->blocks()) fsdp::fully_shard(*block, options);
  return fsdp::fully_shard(*model, options);
}

checkpoint::LoadReport initialize(const Config& config, nn::Llama& model, comm::Runtime& runtime) {
  nn::to_empty(*model, runtime.device());
  at::Generator generator = runtime.default_generator();
  {
    const std::lock_guard lock(generator.mutex());
    generator.set_current_seed(static_cast<uint64_t>(config.training.seed));
  }
  nn::reset_all_parameters(*model);
  return load_weights(config.model, *model, runtime);
}

nn::Llama make_model(const Config& config, c10::TensorOptions options) {
  at::manual_seed(static_cast<uint64_t>(config.training.seed));
  nn::Llama model(model_config(config), options);
  load_weights(config.model, *model, *comm::make_single_runtime());
  return model;
}

fsdp::MixedPrecisionPolicy mixed_precision(const TrainingConfig& training) {
  fsdp::MixedPrecisionPolicy policy;
  policy.param_dtype = reduced_dtype(training.param_dtype);
  policy.reduce_dtype = reduced_dtype(training.reduce_dtype);
  // Left unset, gradients would be reduced in the dtype that they are computed in.
  if (policy.param_dtype && !policy.reduce_dtype) policy.reduce_dtype = at::kFloat;
  return policy;
}

std::unique_ptr<optim::Optimizer> make_optimizer(const Config& config,
                                                 std::vector<at::Tensor> parameters) {
  const OptimizerConfig& chosen = config.optimizer;
  const optim::Implementation implementation =
      chosen.implementation == "fused"      ? optim::Implementation::kFused
      : chosen.implementation == "for-loop" ? optim::Implementation::kSingleTensor
                                            : optim::Implementation::kForeach;
  const double lr = learning_rate(chosen, config.training.steps, 0);
  if (chosen.name == "adamw") {
    return std::make_unique<optim::AdamW>(std::move(parameters),
                                          optim::AdamWOptions{.lr = lr,
                                                              .beta1 = chosen.beta1,
                                                              .beta2 = chosen.beta2,
                                                              .eps = chosen.eps,
                                                              .weight_decay = chosen.weight_decay,
                                                              .implementation = implementation});
  }
  return std::make_unique<optim::SGD>(std::move(parameters),
                                      optim::SGDOptions{.lr = lr,
                                                        .momentum = chosen.momentum,
                                                        .dampening = chosen.dampening,
                                                        .weight_decay = chosen.weight_decay,
                                                        .nesterov = chosen.nesterov,
                                                        .implementation = implementation});
}

double clip_limit(const TrainingConfig& training) {
  return training.max_norm > 0 ? training.max_norm : std::numeric_limits<double>::infinity();
}

}  // namespace ppfsdp::train
