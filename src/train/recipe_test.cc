#include "src/train/recipe.h"

#include <ATen/ops/equal.h>

#include <cmath>

#include "src/nn/llama_config.h"
#include "src/optim/adamw.h"
#include "src/optim/sgd.h"
#include "src/train/config_error.h"
#include "src/train/config_keys.h"
#include "src/train/test_util.h"

namespace ppfsdp::train {
namespace {

Config tiny() {
  Config config;
  config.model.dim = 8;
  config.model.layers = 1;
  config.model.heads = 2;
  config.model.kv_heads = 1;
  config.model.hidden = 12;
  config.data.seq_len = 4;
  return config;
}

std::string check_error(const Config& config) {
  return message_of<ConfigError>([&] { check_config(config); });
}

// It would be found out after the first backward.
TEST(RecipeTest, the_reproducible_norm_is_not_for_gpus) {
  Config config = tiny();
  config.training.reproducible_norm = true;
  EXPECT_EQ(check_error(config), "");
  config.communication.backend = "nccl";
  EXPECT_NE(
      check_error(config).find("training.reproducible_norm = true is for gradients on the CPU"),
      std::string::npos);
  config.training.reproducible_norm = false;
  EXPECT_EQ(check_error(config), "");
}

// --help and the errors list the sizes that there are.
TEST(RecipeTest, table_lists_the_named_sizes) {
  for (const Key& key : config_keys()) {
    if (key.name != "model.name") continue;
    const std::vector<std::string> listed(key.choices.begin(), key.choices.end());
    EXPECT_EQ(listed, nn::llama_config_names());
  }
}

TEST(RecipeTest, model_keys_change_the_named_size) {
  Config config;
  config.model.name = "llama3-8b";
  config.data.seq_len = 77;
  nn::LlamaConfig expected = nn::llama_config("llama3-8b");
  expected.max_seq_len = 77;
  EXPECT_EQ(model_config(config), expected);
  config.model = tiny().model;
  config.model.name = "llama3-8b";
  config.model.vocab = 300;
  config.model.rope_theta = 100.0;
  config.model.tied = true;
  expected.dim = 8;
  expected.n_layers = 1;
  expected.n_heads = 2;
  expected.n_kv_heads = 1;
  expected.hidden_dim = 12;
  expected.vocab_size = 300;
  expected.rope_theta = 100;
  expected.tied_output = true;
  EXPECT_EQ(model_config(config), expected);
}

TEST(RecipeTest, what_does_not_fit_together_is_refused) {
  EXPECT_EQ(check_error(tiny()), "");
  Config config = tiny();
  config.model.heads = 3;
  EXPECT_NE(check_error(config).find("[model]: "), std::string::npos) << check_error(config);
  config = tiny();
  config.training.global_batch = 18;
  EXPECT_NE(check_error(config).find("training.global_batch = 18"), std::string::npos);
  config = tiny();
  config.parallelism.reshard_after_forward = 3;
  EXPECT_EQ(check_error(config),
            "parallelism.reshard_after_forward = 3 does not divide the 4 ranks");
  config = tiny();
  config.communication.backend = "single";
  config.parallelism.ranks = 1;
  config.training.param_dtype = "bfloat16";
  EXPECT_NE(check_error(config).find("must be \"float32\""), std::string::npos);
}

TEST(RecipeTest, seed_alone_decides_the_initial_values) {
  const auto first = make_model(tiny())->parameters();
  make_model(tiny());
  const auto again = make_model(tiny())->parameters();
  Config other = tiny();
  other.training.seed = 1;
  const auto different = make_model(other)->parameters();
  ASSERT_EQ(first.size(), again.size());
  for (size_t i = 0; i < first.size(); ++i) EXPECT_TRUE(at::equal(first[i], again[i])) << i;
  EXPECT_FALSE(at::equal(first[0], different[0]));
}

TEST(RecipeTest, dtypes) {
  TrainingConfig training;
  EXPECT_EQ(mixed_precision(training).param_dtype, std::nullopt);
  EXPECT_EQ(mixed_precision(training).reduce_dtype, std::nullopt);
  training.param_dtype = "bfloat16";
  EXPECT_EQ(mixed_precision(training).param_dtype, at::kBFloat16);
  // Unset would reduce in bfloat16.
  EXPECT_EQ(mixed_precision(training).reduce_dtype, at::kFloat);
  training.reduce_dtype = "float16";
  EXPECT_EQ(mixed_precision(training).reduce_dtype, at::kHalf);
}

TEST(RecipeTest, optimizer_gets_its_options) {
  const auto parameters = [] { return make_model(tiny())->parameters(); };
  Config config = tiny();
  config.optimizer.warmup_steps = 4;
  config.optimizer.lr = 1.0;
  config.optimizer.beta1 = 0.5;
  config.optimizer.beta2 = 0.25;
  config.optimizer.eps = 0.125;
  config.optimizer.weight_decay = 0.75;
  config.optimizer.implementation = "fused";
  auto made = make_optimizer(config, parameters());
  const auto* adamw = dynamic_cast<const optim::AdamW*>(made.get());
  ASSERT_NE(adamw, nullptr);
  EXPECT_EQ(adamw->lr(), 0.25) << "the first step of a warm-up of four";
  EXPECT_EQ(adamw->options().beta1, 0.5);
  EXPECT_EQ(adamw->options().beta2, 0.25);
  EXPECT_EQ(adamw->options().eps, 0.125);
  EXPECT_EQ(adamw->options().weight_decay, 0.75);
  EXPECT_EQ(adamw->options().implementation, optim::Implementation::kFused);

  config.optimizer.name = "sgd";
  config.optimizer.implementation = "for-loop";
  config.optimizer.momentum = 0.5;
  config.optimizer.nesterov = true;
  made = make_optimizer(config, parameters());
  const auto* sgd = dynamic_cast<const optim::SGD*>(made.get());
  ASSERT_NE(sgd, nullptr);
  EXPECT_EQ(sgd->options().momentum, 0.5);
  EXPECT_EQ(sgd->options().weight_decay, 0.75);
  EXPECT_TRUE(sgd->options().nesterov);
  EXPECT_EQ(sgd->options().implementation, optim::Implementation::kSingleTensor);
}

TEST(RecipeTest, no_clipping_is_an_infinite_limit) {
  TrainingConfig training;
  EXPECT_EQ(clip_limit(training), 1.0);
  training.max_norm = 0;
  EXPECT_TRUE(std::isinf(clip_limit(training)));
}

}  // namespace
}  // namespace ppfsdp::train
