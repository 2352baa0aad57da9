#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ppfsdp::nn {

/// Hyperparameters of a Llama, by the names of the published models' params.json where they have
/// one.
struct LlamaConfig {
  int64_t vocab_size = 256;
  int64_t dim = 128;
  int64_t n_layers = 4;
  int64_t n_heads = 4;
  /// Key and value heads; each serves n_heads / n_kv_heads query heads. 0 means n_heads.
  int64_t n_kv_heads = 0;
  /// Width of the feed-forward network. 0 means computed: 2/3 of 4 dim, times ffn_dim_multiplier,
  /// rounded up to a multiple of multiple_of.
  int64_t hidden_dim = 0;
  int64_t multiple_of = 256;
  double ffn_dim_multiplier = 1.0;
  double norm_eps = 1e-5;
  double rope_theta = 10000.0;
  /// Rows of the rotary table: the longest sequence.
  int64_t max_seq_len = 128;
  /// Whether the output projection is the embedding table.
  bool tied_output = false;
  /// Initial values of the projections that write to the residual stream shrink with the depth of
  /// their block (true) or with the number of blocks (false).
  bool depth_init = true;

  int64_t head_dim() const { return dim / n_heads; }
  int64_t kv_heads() const { return n_kv_heads == 0 ? n_heads : n_kv_heads; }
  int64_t ffn_hidden_dim() const;

  /// Throws unless all sizes are positive, heads divide dim, kv heads divide heads and the head
  /// size is even. The error names the field, its value and what it must be.
  void validate() const;

  bool operator==(const LlamaConfig&) const = default;
};

/// "debug", "llama2-7b", "llama2-13b", "llama2-70b", "llama3-8b", "llama3-70b", "llama3-405b".
const std::vector<std::string>& llama_config_names();

/// The hyperparameters of a named size. debug is a byte-level model that trains on a laptop; the
/// others are the published ones. An unknown name is an error that lists the names.
LlamaConfig llama_config(const std::string& name);

/// Number of parameters of Llama(config); a tied matrix counts once.
int64_t parameter_count(const LlamaConfig& config);

/// Floating-point operations of forward and backward for one token in a sequence of `seq_len`:
/// 6 N + 6 L H (d_qk + d_v) T, N the parameters that take part in a matrix product with every token
/// (all but the embedding table's look-up), without a discount for the causal mask. Recomputation
/// by activation checkpointing does not count.
double flops_per_token(const LlamaConfig& config, int64_t seq_len);

}  // namespace ppfsdp::nn
