#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace ppfsdp::train {

/// As fsdp::ReshardAfterForward (the same type): nothing is "auto".
using ReshardSetting = std::variant<std::monostate, bool, int>;

// Units, ranges and meanings of all keys are stated once, in config_keys.cc.

struct ModelConfig {
  std::string name = "debug";
  /// Unset: as the named size has it.
  std::optional<int64_t> dim, layers, heads, kv_heads, hidden, vocab;
  std::optional<double> rope_theta;
  std::optional<bool> tied;
  std::string weights;
  std::string weights_reader = "every_rank";
  bool operator==(const ModelConfig&) const = default;
};

struct DataConfig {
  std::string kind = "text";
  /// Empty with kind "text": LibTorch's own C++ headers.
  std::vector<std::string> files;
  std::string dtype = "uint16";
  int64_t seq_len = 64;
  bool operator==(const DataConfig&) const = default;
};

struct TrainingConfig {
  int64_t steps = 60;
  int64_t global_batch = 16;
  int64_t microbatches = 1;
  int64_t seed = 0;
  double max_norm = 1.0;
  double norm_type = 2.0;
  bool reproducible_norm = false;
  std::string param_dtype = "float32";
  std::string reduce_dtype = "float32";
  bool operator==(const TrainingConfig&) const = default;
};

struct OptimizerConfig {
  std::string name = "adamw";
  double lr = 3e-3;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
  double momentum = 0.9;
  double dampening = 0;
  bool nesterov = false;
  std::string implementation = "foreach";
  int64_t warmup_steps = 5;
  std::string decay = "cosine";
  double min_lr_ratio = 0.1;
  bool operator==(const OptimizerConfig&) const = default;
};

struct ParallelismConfig {
  int64_t ranks = 4;
  ReshardSetting reshard_after_forward;
  bool operator==(const ParallelismConfig&) const = default;
};

struct CommunicationConfig {
  std::string backend = "sim";
  int64_t sim_seed = 0;
  std::string sim_schedule = "lazy";
  std::string sim_order = "gloo_ring";
  bool sim_poison = true;
  double timeout_s = 300;
  bool operator==(const CommunicationConfig&) const = default;
};

struct MetricsConfig {
  std::string jsonl;
  std::string tensorboard;
  std::string if_exists = "error";
  int64_t log_every = 1;
  bool progress = true;
  double peak_tflops = 0;
  bool operator==(const MetricsConfig&) const = default;
};

/// All that `train` and `verify` can be told.
struct Config {
  ModelConfig model;
  DataConfig data;
  TrainingConfig training;
  OptimizerConfig optimizer;
  ParallelismConfig parallelism;
  CommunicationConfig communication;
  MetricsConfig metrics;
  bool operator==(const Config&) const = default;
};

struct LoadedConfig {
  Config config;
  /// The keys ("section.key") that the file or an override gave.
  std::set<std::string> given;
};

/// The defaults, then the TOML file at `path` (none if empty), then `overrides` of the form
/// "section.key=value": the value is written as in TOML, and a string may stand without quotes.
/// Throws ConfigError, one line that names file and line (or the override), the key, what was got
/// and what would be right, for a file that can't be read or parsed and for a key that is unknown,
/// given twice, of another type or out of range.
LoadedConfig load_config(const std::string& path, const std::vector<std::string>& overrides);

/// load_config of a text; `source` stands for the file's name in errors.
LoadedConfig parse_config(std::string_view toml, const std::string& source,
                          const std::vector<std::string>& overrides);

/// TOML that gives `config` back when it is parsed; optional keys that are unset are left out.
std::string to_toml(const Config& config);

/// Every key by section with its default, unit, range and meaning, for --help.
std::string describe_keys();

}  // namespace ppfsdp::train
