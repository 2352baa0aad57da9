#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

#include <cstdint>
#include <vector>

#include "src/nn/embedding.h"
#include "src/nn/linear.h"
#include "src/nn/llama_config.h"
#include "src/nn/module.h"
#include "src/nn/rms_norm.h"

namespace ppfsdp::nn {

// Shapes: B batch, T sequence, D dim, H heads, K kv heads, hd = D / H.

/// The rotation by which position t turns pair i of a head: complex64 [length, head_dim / 2] of
/// unit values at the angle t * theta^(-2 i / head_dim).
at::Tensor rotary_table(int64_t head_dim, int64_t length, double theta);

/// Turns the adjacent pairs of x [B, T, heads, hd] by `table` [T, hd / 2], in float32; the result
/// has x's dtype.
at::Tensor apply_rotary(const at::Tensor& x, const at::Tensor& table);

/// Causal self-attention with rotary positions and grouped kv heads.
class AttentionImpl : public Module {
 public:
  /// `out_std`: of the initial values of wo.
  AttentionImpl(const LlamaConfig& config, double out_std, c10::TensorOptions options);

  /// [B, T, D] and the table's first T rows to [B, T, D].
  at::Tensor forward(const at::Tensor& x, const at::Tensor& table);

  Linear wq = nullptr, wk = nullptr, wv = nullptr, wo = nullptr;

 private:
  int64_t n_heads_, n_kv_heads_, head_dim_;
};
PPFSDP_MODULE(Attention);

/// w2(silu(w1 x) * w3 x).
class FeedForwardImpl : public Module {
 public:
  /// `out_std`: of the initial values of w2 and w3.
  FeedForwardImpl(const LlamaConfig& config, double out_std, c10::TensorOptions options);

  at::Tensor forward(const at::Tensor& x);

  Linear w1 = nullptr, w2 = nullptr, w3 = nullptr;
};
PPFSDP_MODULE(FeedForward);

/// h = x + attention(attention_norm(x)); h + feed_forward(ffn_norm(h)).
class LlamaBlockImpl : public Module {
 public:
  /// `layer` counts from 0; the initial values depend on it.
  LlamaBlockImpl(const LlamaConfig& config, int64_t layer, c10::TensorOptions options = {});

  at::Tensor forward(const at::Tensor& x, const at::Tensor& table);

  Attention attention = nullptr;
  FeedForward feed_forward = nullptr;
  RMSNorm attention_norm = nullptr, ffn_norm = nullptr;
};
PPFSDP_MODULE(LlamaBlock);

/// A decoder-only Llama: tok_embeddings, layers, norm, output.
///
/// Initial values with torchtitan's deviations: the embedding 1, projections 0.02, those that write
/// to the residual stream (wo, w2, and w3 with them) 0.02 / sqrt(2 (layer + 1)), the output 1 /
/// sqrt(D); all but the embedding cut at 3 deviations; norms 1. A tied output is the embedding. All
/// from the default generator, in the order of named_parameters().
class LlamaImpl : public Module {
 public:
  /// Throws for a config that does not validate. `options`: device and dtype of the parameters.
  explicit LlamaImpl(const LlamaConfig& config, c10::TensorOptions options = {});

  /// Token ids int64 [B, T], T <= max_seq_len, to logits [B, T, vocab] in the parameters' dtype.
  at::Tensor forward(const at::Tensor& tokens);

  /// The rotary table; parameters belong to the layers below.
  void reset_parameters() override;

  const LlamaConfig& config() const { return config_; }
  /// For fully_shard: one group each.
  std::vector<LlamaBlock>& blocks() { return blocks_; }

  Embedding tok_embeddings = nullptr;
  RMSNorm norm = nullptr;
  Linear output = nullptr;
  at::Tensor table;  ///< complex64 [max_seq_len, hd / 2]; a buffer that is not persistent

 private:
  LlamaConfig config_;
  std::vector<LlamaBlock> blocks_;
};
PPFSDP_MODULE(Llama);

}  // namespace ppfsdp::nn
