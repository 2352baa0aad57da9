#include "src/nn/llama.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/polar.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/Exception.h>
#include <torch/nn/modules/container/modulelist.h>

#include <cmath>

#include "src/nn/init.h"

namespace ppfsdp::nn {
namespace {

constexpr double kInitStd = 0.02;

// Bounds far beyond the deviation would do harm: a uniform draw of exactly the lowest value, one in
// 2^24, then becomes minus infinity and is clamped to the bound.
Initializer cut_normal(double std) { return trunc_normal(0.0, std, -3 * std, 3 * std); }

Linear projection(Module& owner, const char* name, int64_t in, int64_t out, Initializer init,
                  c10::TensorOptions options) {
  return owner.register_module(
      name,
      std::make_shared<LinearImpl>(
          in, out, LinearImpl::Options{.bias = false, .init = std::move(init), .tensor = options}));
}

double residual_std(const LlamaConfig& config, int64_t layer) {
  const int64_t depth = config.depth_init ? layer + 1 : config.n_layers;
  return kInitStd / std::sqrt(2.0 * static_cast<double>(depth));
}

/// Each kv head beside its copies, for the query heads that share it.
at::Tensor repeat_heads(const at::Tensor& x, int64_t times) {
  return times == 1 ? x : x.repeat_interleave(times, /*dim=*/2);
}

}  // namespace

at::Tensor rotary_table(int64_t head_dim, int64_t length, double theta) {
  // In float32 throughout, and through arange, pow, outer and polar: other ways to compute the
  // angles differ in bits.
  const at::Tensor exponents = -at::arange(0, head_dim, 2).to(at::kFloat) / head_dim;
  const at::Tensor frequencies = at::pow(theta, exponents);
  const at::Tensor angles = at::outer(at::arange(length).to(at::kFloat), frequencies);
  return at::polar(at::ones_like(angles), angles);
}

at::Tensor apply_rotary(const at::Tensor& x, const at::Tensor& table) {
  const at::Tensor pairs = at::view_as_complex(
      x.to(at::kFloat).reshape({x.size(0), x.size(1), x.size(2), x.size(3) / 2, 2}));
  const at::Tensor turned = pairs * table.unsqueeze(0).unsqueeze(2);
  return at::view_as_real(turned).flatten(3).to(x.scalar_type());
}

AttentionImpl::AttentionImpl(const LlamaConfig& config, double out_std, c10::TensorOptions options)
    : n_heads_(config.n_heads), n_kv_heads_(config.kv_heads()), head_dim_(config.head_dim()) {
  const int64_t kv_dim = n_kv_heads_ * head_dim_;
  wq = projection(*this, "wq", config.dim, config.dim, cut_normal(kInitStd), options);
  wk = projection(*this, "wk", config.dim, kv_dim, cut_normal(kInitStd), options);
  wv = projection(*this, "wv", config.dim, kv_dim, cut_normal(kInitStd), options);
  wo = projection(*this, "wo", config.dim, config.dim, cut_normal(out_std), options);
}

at::Tensor AttentionImpl::forward(const at::Tensor& x, const at::Tensor& table) {
  const int64_t b = x.size(0), t = x.size(1);
  const at::Tensor q = apply_rotary(wq(x).view({b, t, n_heads_, head_dim_}), table);
  at::Tensor k = apply_rotary(wk(x).view({b, t, n_kv_heads_, head_dim_}), table);
  at::Tensor v = wv(x).view({b, t, n_kv_heads_, head_dim_});
  k = repeat_heads(k, n_heads_ / n_kv_heads_);
  v = repeat_heads(v, n_heads_ / n_kv_heads_);
  const at::Tensor o = at::scaled_dot_product_attention(
      q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), /*attn_mask=*/{}, /*dropout_p=*/0.0,
      /*is_causal=*/true);
  return wo(o.transpose(1, 2).reshape({b, t, n_heads_ * head_dim_}));
}

FeedForwardImpl::FeedForwardImpl(const LlamaConfig& config, double out_std,
                                 c10::TensorOptions options) {
  const int64_t hidden = config.ffn_hidden_dim();
  w1 = projection(*this, "w1", config.dim, hidden, cut_normal(kInitStd), options);
  w2 = projection(*this, "w2", hidden, config.dim, cut_normal(out_std), options);
  w3 = projection(*this, "w3", config.dim, hidden, cut_normal(out_std), options);
}

at::Tensor FeedForwardImpl::forward(const at::Tensor& x) { return w2(at::silu(w1(x)) * w3(x)); }

LlamaBlockImpl::LlamaBlockImpl(const LlamaConfig& config, int64_t layer,
                               c10::TensorOptions options) {
  const double out_std = residual_std(config, layer);
  attention =
      register_module("attention", std::make_shared<AttentionImpl>(config, out_std, options));
  feed_forward =
      register_module("feed_forward", std::make_shared<FeedForwardImpl>(config, out_std, options));
  attention_norm = register_module(
      "attention_norm", std::make_shared<RMSNormImpl>(config.dim, config.norm_eps, options));
  ffn_norm = register_module("ffn_norm",
                             std::make_shared<RMSNormImpl>(config.dim, config.norm_eps, options));
}

at::Tensor LlamaBlockImpl::forward(const at::Tensor& x, const at::Tensor& table) {
  const at::Tensor h = x + attention(attention_norm(x), table);
  return h + feed_forward(ffn_norm(h));
}

LlamaImpl::LlamaImpl(const LlamaConfig& config, c10::TensorOptions options) : config_(config) {
  config.validate();
  tok_embeddings = register_module(
      "tok_embeddings", std::make_shared<EmbeddingImpl>(config.vocab_size, config.dim,
                                                        EmbeddingImpl::Options{.tensor = options}));
  const auto layers = register_module("layers", std::make_shared<torch::nn::ModuleListImpl>());
  for (int64_t layer = 0; layer < config.n_layers; ++layer) {
    blocks_.emplace_back(std::make_shared<LlamaBlockImpl>(config, layer, options));
    layers->push_back(blocks_.back().ptr());
  }
  norm =
      register_module("norm", std::make_shared<RMSNormImpl>(config.dim, config.norm_eps, options));
  if (config.tied_output) {
    output = register_module("output", std::make_shared<LinearImpl>(tok_embeddings->weight));
  } else {
    const double std = 1 / std::sqrt(static_cast<double>(config.dim));
    output = projection(*this, "output", config.dim, config.vocab_size, cut_normal(std), options);
  }
  register_buffer(
      "table", table,
      at::empty({config.max_seq_len, config.head_dim() / 2}, options.dtype(at::kComplexFloat)),
      /*persistent=*/false);
  reset_parameters();
}

at::Tensor LlamaImpl::forward(const at::Tensor& tokens) {
  TORCH_CHECK(tokens.dim() == 2, "Llama: tokens ", tokens.sizes(), " must be [batch, sequence]");
  const int64_t t = tokens.size(1);
  TORCH_CHECK(t <= config_.max_seq_len, "Llama: a sequence of ", t,
              " tokens is longer than max_seq_len ", config_.max_seq_len);
  const at::Tensor rotations = t == config_.max_seq_len ? table : table.slice(0, 0, t);
  at::Tensor x = tok_embeddings(tokens);
  for (LlamaBlock& block : blocks_) x = block(x, rotations);
  return output(norm(x));
}

void LlamaImpl::reset_parameters() {
  at::NoGradGuard no_grad;
  if (!table.is_meta()) {
    table.copy_(rotary_table(config_.head_dim(), config_.max_seq_len, config_.rope_theta));
  }
}

}  // namespace ppfsdp::nn
