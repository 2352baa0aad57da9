#include "src/train/memory_need.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ppfsdp::train {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr double kGiB = 1 << 30;

Config config_of(const std::string& model, const std::string& backend = "sim") {
  Config config;
  config.model.name = model;
  config.communication.backend = backend;
  return config;
}

// The published count of Llama 2 7B's parameters, four bytes each, four values: the parameter, its
// gradient and AdamW's two moments.
TEST(MemoryNeed, CountsParametersGradientsAndOptimizerState) {
  constexpr double kParameters = 6738415616.0;
  Config config = config_of("llama2-7b");
  EXPECT_EQ(least_bytes(config), kParameters * 16);
  config.optimizer.name = "sgd";
  EXPECT_EQ(least_bytes(config), kParameters * 12);
  config.optimizer.momentum = 0;
  EXPECT_EQ(least_bytes(config), kParameters * 8);
  config.parallelism.ranks = 64;
  EXPECT_EQ(least_bytes(config), kParameters * 8) << "sharded once, over however many ranks";
}

TEST(MemoryNeed, RefusesWhatDoesNotFitAndNothingElse) {
  const Config config = config_of("llama2-7b");
  const double need = least_bytes(config);
  EXPECT_EQ(refuse_memory(config, need, 1), "");
  EXPECT_NE(refuse_memory(config, need - 1, 1), "");
  EXPECT_EQ(refuse_memory(config_of("debug"), kGiB, 1), "");
  EXPECT_EQ(refuse_memory(config_of("llama3-405b"), 32 * kGiB, 1),
            "training model.name = \"llama3-405b\" needs at least 6047.7 GiB of memory on this "
            "machine, which has 32.0 GiB: 405.85 G parameters, their gradients and 2 value(s) of "
            "optimizer state each, in float32; choose a smaller model, or more machines");
}

// Under a launcher a machine holds the shards of its own processes.
TEST(MemoryNeed, OfALaunchedWorldIsThisMachinesShare) {
  Config config = config_of("llama2-7b", "gloo");
  config.parallelism.ranks = 8;
  const double need = least_bytes(config);
  EXPECT_EQ(refuse_memory(config, need / 4, 2), "");
  EXPECT_THAT(refuse_memory(config, need / 4, 3),
              AllOf(HasSubstr("needs at least 37.7 GiB"), HasSubstr(", 3 of 8 ranks;")));
  // Simulated ranks are all in this one process.
  config.communication.backend = "sim";
  EXPECT_NE(refuse_memory(config, need / 4, 2), "");
}

// Numbers that no machine has must not wrap round to small ones.
TEST(MemoryNeed, HoldsForTheLargestModelThatAConfigCanName) {
  Config config = config_of("debug");
  config.model.dim = 1 << 22;
  config.model.heads = config.model.kv_heads = 1;
  config.model.hidden = 1 << 24;
  config.model.layers = 4096;
  EXPECT_GT(least_bytes(config), 1e18);
}

}  // namespace
}  // namespace ppfsdp::train
