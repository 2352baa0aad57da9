#include "src/train/rank_memory.h"

#include <gtest/gtest.h>

#include "sim/mesh/world.h"
#include "src/comm/single_runtime.h"

namespace ppfsdp::train {
namespace {

/// A block of 8 (8 + 4 + 4 + 8) + 3 * 8 * 12 + 2 * 8 = 496 parameters; the root's group of
/// 2 * 256 * 8 + 8 = 4104.
Config tiny() {
  Config config;
  config.model.dim = 8;
  config.model.layers = 2;
  config.model.heads = 2;
  config.model.kv_heads = 1;
  config.model.hidden = 12;
  config.data.seq_len = 4;
  return config;
}

// By hand, with the padding of 12 and 8 rows over 5 ranks: 3 and 2 rows each.
TEST(RankMemory, CountsWhatARankHolds) {
  sim::run_world(5, {}, [](comm::Runtime& runtime) {
    Config config = tiny();
    config.training.param_dtype = "bfloat16";
    const RankMemory memory = count_rank_memory(config, runtime);
    EXPECT_EQ(memory.parameters, 2 * 496 + 4104);
    EXPECT_EQ(memory.groups, 3);
    // wq, wo [8, 8], wk, wv [4, 8], w1, w3 [12, 8], w2 [8, 12], two norms [8].
    const int64_t block = 2 * 2 * 8 + 2 * 1 * 8 + 2 * 3 * 8 + 2 * 12 + 2 * 2;
    const int64_t root = 2 * 52 * 8 + 2;
    EXPECT_EQ(memory.parameter_bytes, (2 * block + root) * 4);
    EXPECT_EQ(memory.gradient_bytes, memory.parameter_bytes);
    EXPECT_EQ(memory.largest_group_bytes, 4104 * 2) << "in bfloat16";
    if (runtime.rank() == 0) {
      EXPECT_EQ(memory.optimizer_bytes, 2 * memory.parameter_bytes);
    }
    if (runtime.rank() == 4) {
      EXPECT_LT(memory.optimizer_bytes, 2 * memory.parameter_bytes);
    }
  });
}

TEST(RankMemory, OneDeviceHoldsAll) {
  Config config = tiny();
  config.communication.backend = "single";
  config.optimizer.name = "sgd";
  const auto runtime = comm::make_single_runtime();
  const RankMemory memory = count_rank_memory(config, *runtime);
  EXPECT_EQ(memory.parameters, 2 * 496 + 4104);
  EXPECT_EQ(memory.groups, 0);
  EXPECT_EQ(memory.parameter_bytes, memory.parameters * 4);
  EXPECT_EQ(memory.optimizer_bytes, memory.parameters * 4) << "momentum";
  config.optimizer.momentum = 0;
  EXPECT_EQ(count_rank_memory(config, *runtime).held_bytes(), memory.parameters * 8);
}

// On one device the optimizer's state alone is more than an int64_t holds.
TEST(RankMemory, HoldsForTheLargestModelThatAConfigCanName) {
  Config config = tiny();
  config.communication.backend = "single";
  config.model.dim = 1 << 22;
  config.model.layers = 4096;
  config.model.heads = config.model.kv_heads = 64;
  config.model.hidden = 1 << 24;
  const RankMemory memory = count_rank_memory(config, *comm::make_single_runtime());
  const auto parameters = static_cast<double>(memory.parameters);
  EXPECT_GT(parameters, 1e18);
  EXPECT_DOUBLE_EQ(memory.optimizer_bytes, 8 * parameters);
  EXPECT_DOUBLE_EQ(memory.held_bytes(), 16 * parameters);
}

}  // namespace
}  // namespace ppfsdp::train
