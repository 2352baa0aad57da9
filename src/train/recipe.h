#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

#include <memory>
#include <vector>

#include "src/checkpoint/load_weights.h"
#include "src/comm/runtime.h"
#include "src/fsdp/fully_shard.h"
#include "src/nn/llama.h"
#include "src/nn/llama_config.h"
#include "src/optim/optimizer.h"
#include "src/train/config.h"

namespace ppfsdp::train {

// What a Config makes, for the trainer and for those that check it.

/// The named size with the changes of [model], for sequences of data.seq_len. Throws ConfigError
/// for sizes that do not fit together.
nn::LlamaConfig model_config(const Config& config);

/// Throws ConfigError for what only shows when keys are seen together: model sizes, a global batch
/// that the ranks and microbatches do not divide, reshard_after_forward = k that does not divide
/// the ranks, other dtypes on one device, the reproducible norm on GPUs.
void check_config(const Config& config);

/// The model on the meta device: without memory and values. fully_shard it, or not, and then
/// initialize it.
nn::Llama make_meta_model(const Config& config);

/// fully_shard on each block and then on the model, over all ranks of `runtime`, as [parallelism]
/// and [training] say. Every rank calls it.
fsdp::FSDPModule shard(const Config& config, nn::Llama& model, comm::Runtime& runtime);

/// Gives a model from make_meta_model its memory on the runtime's device, of what is sharded this
/// rank's part alone, and its values: initial ones by training.seed, or those of model.weights.
/// Every rank calls it. Seeds runtime.default_generator(). Returns what the load reports. Throws
/// ConfigError, on every rank, for weights that cannot be loaded.
checkpoint::LoadReport initialize(const Config& config, nn::Llama& model, comm::Runtime& runtime);

/// The same model, whole, on this process alone, built in one go: initialize gives each rank the
/// parts of its values, bit for bit. Seeds the default CPU generator. `options`: device and dtype
/// of the parameters.
nn::Llama make_model(const Config& config, c10::TensorOptions options = {});

/// Unset where the dtype is the parameters' own, float32.
fsdp::MixedPrecisionPolicy mixed_precision(const TrainingConfig& training);

/// The optimizer that [optimizer] describes, over `parameters`, at the first step's learning rate.
std::unique_ptr<optim::Optimizer> make_optimizer(const Config& config,
                                                 std::vector<at::Tensor> parameters);

/// What clipping is given as its limit: training.max_norm, or infinity where that is 0, so that the
/// gradients stay as they are and the norm is measured.
double clip_limit(const TrainingConfig& training);

}  // namespace ppfsdp::train
