#include "src/nn/llama.h"

#include <ATen/Context.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "src/nn/loss.h"

namespace ppfsdp::nn {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

LlamaConfig small() {
  return {
      .vocab_size = 11, .dim = 12, .n_layers = 2, .n_heads = 2, .hidden_dim = 5, .max_seq_len = 8};
}

std::string error_of(LlamaConfig config) {
  try {
    config.validate();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

TEST(LlamaConfig, PublishedModelsHaveTheirParameterCounts) {
  EXPECT_EQ(parameter_count(llama_config("llama2-7b")), 6'738'415'616);
  EXPECT_EQ(parameter_count(llama_config("llama2-13b")), 13'015'864'320);
  EXPECT_EQ(parameter_count(llama_config("llama2-70b")), 68'976'648'192);
  EXPECT_EQ(parameter_count(llama_config("llama3-8b")), 8'030'261'248);
  EXPECT_EQ(parameter_count(llama_config("llama3-70b")), 70'553'706'496);
  EXPECT_EQ(parameter_count(llama_config("llama3-405b")), 405'853'388'800);
}

TEST(LlamaConfig, PublishedModelsHaveTheirFeedForwardWidths) {
  EXPECT_EQ(llama_config("llama2-7b").ffn_hidden_dim(), 11008);
  EXPECT_EQ(llama_config("llama2-13b").ffn_hidden_dim(), 13824);
  EXPECT_EQ(llama_config("llama2-70b").ffn_hidden_dim(), 28672);
  EXPECT_EQ(llama_config("llama3-8b").ffn_hidden_dim(), 14336);
  EXPECT_EQ(llama_config("llama3-70b").ffn_hidden_dim(), 28672);
  EXPECT_EQ(llama_config("llama3-405b").ffn_hidden_dim(), 53248);
}

TEST(LlamaConfig, ClosedFormCountsWhatTheModelHas) {
  LlamaConfig tied = small();
  tied.tied_output = true;
  LlamaConfig grouped = small();
  grouped.n_kv_heads = 1;
  for (const LlamaConfig& config : {small(), tied, grouped, llama_config("debug")}) {
    Llama model(config);
    int64_t counted = 0;
    for (const at::Tensor& parameter : model->parameters()) counted += parameter.numel();
    EXPECT_EQ(parameter_count(config), counted);
  }
}

TEST(LlamaConfig, PublishedModelsCountRightOnMetaTensorsToo) {
  // The closed form could share a mistake with the test above only if the layers did as well.
  Llama model(llama_config("llama3-8b"), at::kMeta);
  int64_t counted = 0;
  for (const at::Tensor& parameter : model->parameters()) counted += parameter.numel();
  EXPECT_EQ(counted, 8'030'261'248);
}

TEST(LlamaConfig, FlopsPerTokenLeaveOutTheLookUpOnly) {
  const LlamaConfig config = llama_config("llama2-7b");
  const double products = 6'738'415'616.0 - 32000.0 * 4096.0;
  EXPECT_EQ(flops_per_token(config, 2048), 6 * products + 6.0 * 32 * 32 * 256 * 2048);
  LlamaConfig tied = small();
  tied.tied_output = true;
  EXPECT_EQ(flops_per_token(tied, 8), flops_per_token(small(), 8));
}

TEST(LlamaConfig, EveryNameIsAConfigThatValidates) {
  for (const std::string& name : llama_config_names()) {
    EXPECT_NO_THROW(llama_config(name).validate()) << name;
  }
  try {
    llama_config("llama9");
    FAIL();
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what_without_backtrace(), HasSubstr("'llama9'; there are debug, llama2-7b"));
  }
}

TEST(LlamaConfig, ErrorsNameTheField) {
  LlamaConfig config = small();
  config.dim = 13;
  EXPECT_THAT(error_of(config), HasSubstr("dim 13 is not a multiple of n_heads 2"));
  config = small();
  config.dim = 10;
  EXPECT_THAT(error_of(config), HasSubstr("= 5 is odd"));
  config = small();
  config.n_heads = 4, config.n_kv_heads = 3, config.dim = 16;
  EXPECT_THAT(error_of(config), HasSubstr("n_heads 4 is not a multiple of n_kv_heads 3"));
  config = small();
  config.vocab_size = 0;
  EXPECT_THAT(error_of(config), HasSubstr("vocab_size is 0"));
}

TEST(Rotary, TurnsEachPairByItsAngle) {
  const int64_t t = 5, hd = 4;
  const at::Tensor x = at::randn({1, t, 1, hd});
  const at::Tensor y = apply_rotary(x, rotary_table(hd, t, 10000.0));
  for (int64_t position = 0; position < t; ++position) {
    for (int64_t pair = 0; pair < hd / 2; ++pair) {
      const double angle = position * std::pow(10000.0, -2.0 * pair / hd);
      const double a = x[0][position][0][2 * pair].item<double>();
      const double b = x[0][position][0][2 * pair + 1].item<double>();
      // Three roundings of float32 on values below 5, and the angle's own: 4 * 2^-24 relative.
      EXPECT_NEAR(y[0][position][0][2 * pair].item<double>(),
                  a * std::cos(angle) - b * std::sin(angle), 5e-6);
      EXPECT_NEAR(y[0][position][0][2 * pair + 1].item<double>(),
                  a * std::sin(angle) + b * std::cos(angle), 5e-6);
    }
  }
}

TEST(Llama, ParameterNamesAreTheOnesCheckpointsUse) {
  Llama model(small());
  const std::vector<std::string> names = model->named_parameters().keys();
  ASSERT_EQ(names.size(), 21u);
  EXPECT_EQ(names.front(), "tok_embeddings.weight");
  EXPECT_THAT(std::vector<std::string>(names.begin() + 1, names.begin() + 10),
              ElementsAre("layers.0.attention.wq.weight", "layers.0.attention.wk.weight",
                          "layers.0.attention.wv.weight", "layers.0.attention.wo.weight",
                          "layers.0.feed_forward.w1.weight", "layers.0.feed_forward.w2.weight",
                          "layers.0.feed_forward.w3.weight", "layers.0.attention_norm.weight",
                          "layers.0.ffn_norm.weight"));
  EXPECT_THAT(std::vector<std::string>(names.end() - 2, names.end()),
              ElementsAre("norm.weight", "output.weight"));
  EXPECT_THAT(model->named_buffers().keys(), ElementsAre("table"));
  EXPECT_FALSE(model->is_buffer_persistent("table"));
}

TEST(Llama, IsCausal) {
  at::manual_seed(5);
  Llama model(small());
  at::NoGradGuard no_grad;
  at::Tensor tokens = at::randint(11, {1, 8}, at::kLong);
  const at::Tensor before = model(tokens);
  tokens[0][5] = (tokens[0][5].item<int64_t>() + 1) % 11;
  const at::Tensor after = model(tokens);
  EXPECT_TRUE(at::equal(before.slice(1, 0, 5), after.slice(1, 0, 5)));
  EXPECT_FALSE(at::equal(before.slice(1, 5), after.slice(1, 5)));
}

TEST(Llama, PositionsMatter) {
  // Without rotation, a sequence of one repeated token would give the same logits at every place.
  at::manual_seed(5);
  Llama model(small());
  at::NoGradGuard no_grad;
  const at::Tensor logits = model(at::tensor({1, 2, 1, 1}, at::kLong).view({1, 4}));
  EXPECT_FALSE(at::allclose(logits[0][2], logits[0][3], 1e-4, 1e-6));
}

TEST(Llama, ShortSequencesUseTheFirstRowsOfTheTable) {
  at::manual_seed(5);
  Llama model(small());
  at::NoGradGuard no_grad;
  const at::Tensor tokens = at::randint(11, {2, 8}, at::kLong);
  EXPECT_TRUE(at::allclose(model(tokens.slice(1, 0, 3)), model(tokens).slice(1, 0, 3), 1e-5, 1e-6));
  EXPECT_THROW(model(at::zeros({1, 9}, at::kLong)), c10::Error);
  EXPECT_THROW(model(at::zeros({8}, at::kLong)), c10::Error);
}

TEST(Llama, GroupedHeadsEqualFullHeadsWithCopiedKeysAndValues) {
  LlamaConfig grouped = small();
  grouped.n_heads = 6, grouped.n_kv_heads = 2;
  LlamaConfig full = grouped;
  full.n_kv_heads = 6;
  Llama a(grouped), b(full);
  at::NoGradGuard no_grad;
  auto from = a->named_parameters();
  for (auto& to : b->named_parameters()) {
    const at::Tensor& value = from[to.key()];
    const bool shared = to.key().ends_with("wk.weight") || to.key().ends_with("wv.weight");
    // [K hd, D]: each head's hd rows, three times.
    to.value().copy_(shared ? value.view({2, 2, 12}).repeat_interleave(3, 0).view({12, 12})
                            : value);
  }
  const at::Tensor tokens = at::randint(11, {2, 8}, at::kLong);
  EXPECT_TRUE(at::allclose(a(tokens), b(tokens), 1e-5, 1e-6));
}

TEST(Llama, TiedOutputIsTheEmbedding) {
  LlamaConfig config = small();
  config.tied_output = true;
  Llama model(config);
  EXPECT_TRUE(model->output->weight.is_same(model->tok_embeddings->weight));
  EXPECT_EQ(model->named_parameters().size(), 20u);
  next_token_loss(model(at::zeros({1, 8}, at::kLong)), at::zeros({1, 8}, at::kLong)).backward();
  // Rows that are looked up by no token still get a gradient, through the output.
  EXPECT_GT(model->tok_embeddings->weight.grad()[3].abs().max().item<float>(), 0.0F);
}

TEST(Llama, ResetGivesTheSameValuesAsConstruction) {
  at::manual_seed(9);
  Llama model(small());
  std::vector<at::Tensor> first;
  for (const at::Tensor& parameter : model->parameters()) first.push_back(parameter.clone());
  const at::Tensor table = model->table.clone();
  model->table.zero_();
  at::manual_seed(9);
  reset_all_parameters(*model);
  const std::vector<at::Tensor> again = model->parameters();
  for (size_t i = 0; i < first.size(); ++i) EXPECT_TRUE(at::equal(first[i], again[i])) << i;
  EXPECT_TRUE(at::equal(table, model->table));
}

TEST(Llama, DeeperBlocksStartSmaller) {
  at::manual_seed(9);
  LlamaConfig config = small();
  config.dim = 64;
  Llama model(config);
  const double first = model->blocks()[0]->attention->wo->weight.std().item<double>();
  const double second = model->blocks()[1]->attention->wo->weight.std().item<double>();
  // 4096 values each: the deviations' estimates err by 1.1 %.
  EXPECT_NEAR(second / first, std::sqrt(0.5), 0.05);
  EXPECT_NEAR(first, 0.9866 * 0.02 / std::sqrt(2.0), 0.05 * 0.02);
}

TEST(Llama, GradientsEqualFiniteDifferences) {
  at::manual_seed(4);
  Llama model(small(), at::kDouble);
  const at::Tensor tokens = at::randint(11, {2, 6}, at::kLong);
  const at::Tensor labels = at::randint(11, {2, 6}, at::kLong);
  // The rotation and the norms are computed in float32 on purpose, so the loss is only that exact:
  // with the step h its noise is 1e-7 / h and the truncation h^2.
  const double h = 1e-2;
  const auto loss = [&] { return next_token_loss(model(tokens), labels); };
  loss().backward();
  at::NoGradGuard no_grad;
  for (auto& item : model->named_parameters()) {
    at::Tensor flat = item.value().data().view(-1);
    const int64_t at = flat.numel() / 2;
    const double value = flat[at].item<double>();
    flat[at] = value + h;
    const double up = loss().item<double>();
    flat[at] = value - h;
    const double down = loss().item<double>();
    flat[at] = value;
    EXPECT_NEAR(item.value().grad().view(-1)[at].item<double>(), (up - down) / (2 * h), 1e-4)
        << item.key();
  }
}

}  // namespace
}  // namespace ppfsdp::nn
