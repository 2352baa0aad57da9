#include "src/train/schedule.h"

#include <gtest/gtest.h>

#include <cmath>

namespace ppfsdp::train {
namespace {

OptimizerConfig optimizer(const std::string& decay, double min_lr_ratio) {
  OptimizerConfig optimizer;
  optimizer.lr = 2.0;
  optimizer.warmup_steps = 4;
  optimizer.decay = decay;
  optimizer.min_lr_ratio = min_lr_ratio;
  return optimizer;
}

TEST(ScheduleTest, warmup_rises_from_one_part_to_the_whole) {
  for (const std::string decay : {"none", "linear", "cosine"}) {
    for (int64_t step = 0; step < 4; ++step) {
      EXPECT_EQ(learning_rate(optimizer(decay, 0), 12, step), 0.5 * static_cast<double>(step + 1));
    }
    EXPECT_EQ(learning_rate(optimizer(decay, 0), 12, 4), 2.0) << "the step after warm-up has lr";
  }
}

TEST(ScheduleTest, linear_falls_in_equal_parts_to_the_ratio) {
  // 8 steps of decay from 2 to 1: an eighth each; exact in binary.
  for (int64_t step = 4; step <= 12; ++step) {
    EXPECT_EQ(learning_rate(optimizer("linear", 0.5), 12, step),
              2.0 - static_cast<double>(step - 4) / 8);
  }
}

TEST(ScheduleTest, cosine_is_half_way_in_the_middle_and_steep_there) {
  const OptimizerConfig cosine = optimizer("cosine", 0.5);
  // cos(pi / 2) and cos(pi / 4) in double are off by an ulp of 1 at most.
  EXPECT_NEAR(learning_rate(cosine, 12, 8), 1.5, 1e-15);
  EXPECT_NEAR(learning_rate(cosine, 12, 6), 1.0 + (1.0 + std::sqrt(0.5)) / 2, 1e-15);
  EXPECT_NEAR(learning_rate(cosine, 12, 10), 1.0 + (1.0 - std::sqrt(0.5)) / 2, 1e-15);
  EXPECT_GT(learning_rate(cosine, 12, 11), 1.0) << "no step before the end is at the floor";
}

TEST(ScheduleTest, no_warmup_and_warmup_longer_than_training) {
  OptimizerConfig none = optimizer("none", 0);
  none.warmup_steps = 0;
  EXPECT_EQ(learning_rate(none, 3, 0), 2.0);
  EXPECT_EQ(learning_rate(optimizer("cosine", 0), 2, 1), 1.0) << "still warming up at the end";
}

}  // namespace
}  // namespace ppfsdp::train
