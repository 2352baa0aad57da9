#include "src/nn/llama_config.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <map>

namespace ppfsdp::nn {
namespace {

const std::map<std::string, LlamaConfig>& configs() {
  static const std::map<std::string, LlamaConfig> all = [] {
    std::map<std::string, LlamaConfig> result;
    result["debug"] = {.vocab_size = 256,
                       .dim = 128,
                       .n_layers = 4,
                       .n_heads = 4,
                       .n_kv_heads = 2,
                       .multiple_of = 32,
                       .max_seq_len = 512};
    result["llama2-7b"] = {.vocab_size = 32000,
                           .dim = 4096,
                           .n_layers = 32,
                           .n_heads = 32,
                           .multiple_of = 256,
                           .max_seq_len = 4096};
    result["llama2-13b"] = {.vocab_size = 32000,
                            .dim = 5120,
                            .n_layers = 40,
                            .n_heads = 40,
                            .multiple_of = 256,
                            .max_seq_len = 4096};
    result["llama2-70b"] = {.vocab_size = 32000,
                            .dim = 8192,
                            .n_layers = 80,
                            .n_heads = 64,
                            .n_kv_heads = 8,
                            .multiple_of = 4096,
                            .ffn_dim_multiplier = 1.3,
                            .max_seq_len = 4096};
    result["llama3-8b"] = {.vocab_size = 128256,
                           .dim = 4096,
                           .n_layers = 32,
                           .n_heads = 32,
                           .n_kv_heads = 8,
                           .multiple_of = 1024,
                           .ffn_dim_multiplier = 1.3,
                           .rope_theta = 500000.0,
                           .max_seq_len = 8192};
    result["llama3-70b"] = {.vocab_size = 128256,
                            .dim = 8192,
                            .n_layers = 80,
                            .n_heads = 64,
                            .n_kv_heads = 8,
                            .multiple_of = 4096,
                            .ffn_dim_multiplier = 1.3,
                            .rope_theta = 500000.0,
                            .max_seq_len = 8192};
    result["llama3-405b"] = {.vocab_size = 128256,
                             .dim = 16384,
                             .n_layers = 126,
                             .n_heads = 128,
                             .n_kv_heads = 8,
                             .multiple_of = 4096,
                             .ffn_dim_multiplier = 1.2,
                             .rope_theta = 500000.0,
                             .max_seq_len = 8192};
    return result;
  }();
  return all;
}

void check_positive(const char* field, double value) {
  TORCH_CHECK(value > 0, "LlamaConfig: ", field, " is ", value, ", must be positive");
}

/// Parameters of one block.
int64_t block_parameter_count(const LlamaConfig& config) {
  const int64_t kv_dim = config.kv_heads() * config.head_dim();
  const int64_t attention = 2 * config.dim * config.dim + 2 * kv_dim * config.dim;
  const int64_t feed_forward = 3 * config.dim * config.ffn_hidden_dim();
  const int64_t norms = 2 * config.dim;
  return attention + feed_forward + norms;
}

}  // namespace

int64_t LlamaConfig::ffn_hidden_dim() const {
  if (hidden_dim > 0) return hidden_dim;
  // Truncated after each factor, as the published models' code does.
  const int64_t two_thirds = 4 * dim * 2 / 3;
  const int64_t scaled = static_cast<int64_t>(ffn_dim_multiplier * static_cast<double>(two_thirds));
  return (scaled + multiple_of - 1) / multiple_of * multiple_of;
}

void LlamaConfig::validate() const {
  check_positive("vocab_size", static_cast<double>(vocab_size));
  check_positive("dim", static_cast<double>(dim));
  check_positive("n_layers", static_cast<double>(n_layers));
  check_positive("n_heads", static_cast<double>(n_heads));
  check_positive("multiple_of", static_cast<double>(multiple_of));
  check_positive("ffn_dim_multiplier", ffn_dim_multiplier);
  check_positive("norm_eps", norm_eps);
  check_positive("rope_theta", rope_theta);
  check_positive("max_seq_len", static_cast<double>(max_seq_len));
  TORCH_CHECK(n_kv_heads >= 0, "LlamaConfig: n_kv_heads is ", n_kv_heads,
              ", must be positive, or 0 for as many as n_heads");
  TORCH_CHECK(hidden_dim >= 0, "LlamaConfig: hidden_dim is ", hidden_dim,
              ", must be positive, or 0 to have it computed");
  TORCH_CHECK(dim % n_heads == 0, "LlamaConfig: dim ", dim, " is not a multiple of n_heads ",
              n_heads);
  TORCH_CHECK(n_heads % kv_heads() == 0, "LlamaConfig: n_heads ", n_heads,
              " is not a multiple of n_kv_heads ", n_kv_heads);
  TORCH_CHECK(head_dim() % 2 == 0, "LlamaConfig: the head size dim / n_heads = ", head_dim(),
              " is odd; rotary embedding needs pairs");
}

const std::vector<std::string>& llama_config_names() {
  static const std::vector<std::string> names = {
      "debug", "llama2-7b", "llama2-13b", "llama2-70b", "llama3-8b", "llama3-70b", "llama3-405b"};
  return names;
}

LlamaConfig llama_config(const std::string& name) {
  const auto found = configs().find(name);
  TORCH_CHECK(found != configs().end(), "no Llama is called '", name, "'; there are ",
              fmt::format("{}", fmt::join(llama_config_names(), ", ")));
  return found->second;
}

int64_t parameter_count(const LlamaConfig& config) {
  const int64_t tables = (config.tied_output ? 1 : 2) * config.vocab_size * config.dim;
  return tables + config.n_layers * block_parameter_count(config) + config.dim;
}

double flops_per_token(const LlamaConfig& config, int64_t seq_len) {
  // A tied table also is the output projection: it stays in.
  const int64_t looked_up = config.tied_output ? 0 : config.vocab_size * config.dim;
  const auto products = static_cast<double>(parameter_count(config) - looked_up);
  const auto head_dims = static_cast<double>(2 * config.head_dim());
  return 6.0 * products + 6.0 * static_cast<double>(config.n_layers * config.n_heads) * head_dims *
                              static_cast<double>(seq_len);
}

}  // namespace ppfsdp::nn
