#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "src/nn/llama_config.h"

namespace ppfsdp::golden {

/// One training run of a small Llama: the fields of a case file, with its defaults.
struct Case {
  int64_t world = 2;
  int64_t replicate = 1;  ///< ranks that replicate instead of shard
  int64_t vocab = 128;
  int64_t dim = 32;
  int64_t heads = 4;
  int64_t kv_heads = 4;
  int64_t layers = 2;
  int64_t hidden = 86;
  int64_t batch = 2;  ///< sequences of one rank's microbatch
  int64_t seq = 16;
  int64_t steps = 5;
  int64_t accumulate = 1;  ///< microbatches a step; only the last one reduces gradients
  std::variant<bool, int64_t> reshard = true;  ///< reshard_after_forward of every group
  std::optional<at::ScalarType> param_dtype, reduce_dtype;  ///< mixed precision
  double clip = 1.0;                                        ///< largest gradient norm; 0 is off
  double norm_type = 2.0;
  bool foreach = false;
  std::string optimizer = "adamw";  ///< weight decay 0.1; or "sgd", momentum 0.9
  double lr = 1e-2;
  std::string frozen;  ///< parameters whose name contains this are not trained
  bool tied = false;
  int64_t seed = 7;

  nn::LlamaConfig model() const;
  /// Throws, naming the field, its value and what it must be.
  void validate() const;
};

/// What one step of the recorded run gave.
struct ExpectedStep {
  double loss = 0;                    ///< mean over ranks, summed over microbatches
  std::vector<double> loss_per_rank;  ///< one a rank
  std::optional<double> grad_norm;    ///< before clipping
};

using TensorMap = std::map<std::string, at::Tensor>;

/// What a run starts from.
struct Inputs {
  TensorMap init;                          ///< parameter name to float32 value
  std::vector<at::Tensor> tokens, labels;  ///< a step: int64 [accumulate, world, batch, seq]
};

/// What a run gives. Gradients are those of the first and the last step, after clipping.
struct Outputs {
  std::vector<ExpectedStep> steps;
  std::map<int64_t, TensorMap> grads;
  TensorMap final;
  std::vector<double> step_ms;
};

/// A case file with its tensors.
struct Recording {
  std::string name;     ///< the file's stem
  std::string kernels;  ///< kernel_fingerprint() where it was recorded; empty if unknown
  Case config;
  Inputs inputs;
  Outputs outputs;
};

/// Reads the "case" of F.json. Errors name the file, and the field or the line.
Case read_case(const std::filesystem::path& json);
/// Reads F.json and F.safetensors beside it, and checks that every tensor is there with the sizes
/// that the case needs and that token ids fit the vocabulary.
Recording read_recording(const std::filesystem::path& json);
/// F.safetensors of F.json.
std::filesystem::path tensors_beside(const std::filesystem::path& json);

/// Writes F.json and F.safetensors.
void write_recording(const Recording& recording, const std::filesystem::path& json);

/// Initial values and tokens that depend on the case's seed alone, for `steps` steps.
Inputs make_inputs(const Case& config, int64_t steps);

}  // namespace ppfsdp::golden
