#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

#include <memory>
#include <vector>

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
/// the ranks, other dtypes on one device.
void check_config(const Config& config);

/// The model with initial values by training.seed, the same on every rank. Seeds the default CPU
/// generator. `options`: device and dtype of the parameters.
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
