#include "src/train/sampler.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <set>

#include "src/train/config_error.h"

namespace ppfsdp::train {
namespace {

// In every epoch each window must come exactly once: none skipped, none trained on twice.
TEST(SamplerTest, every_epoch_is_a_permutation) {
  EXPECT_TRUE(rc::check([] {
    const int64_t seq_len = *rc::gen::inRange<int64_t>(1, 9);
    const int64_t tokens = *rc::gen::inRange<int64_t>(seq_len + 1, 3000);
    const Sampler sampler(tokens, seq_len, *rc::gen::arbitrary<uint64_t>());
    const int64_t epoch = *rc::gen::inRange<int64_t>(0, 1000000);
    std::set<int64_t> seen;
    for (int64_t i = 0; i < sampler.windows(); ++i) {
      const int64_t offset = sampler.offset(epoch * sampler.windows() + i);
      RC_ASSERT(offset % seq_len == 0);
      RC_ASSERT(offset >= 0 && offset + seq_len < tokens);
      RC_ASSERT(seen.insert(offset).second);
    }
  }));
}

// Frozen values: a change of the order would silently change what a seed means.
TEST(SamplerTest, order_is_frozen) {
  const Sampler sampler(1001, 10, 7);
  std::vector<int64_t> offsets;
  for (int64_t i = 0; i < 8; ++i) offsets.push_back(sampler.offset(i));
  EXPECT_EQ(offsets, (std::vector<int64_t>{140, 430, 760, 310, 270, 550, 670, 880}));
}

TEST(SamplerTest, seed_and_epoch_change_the_order) {
  const Sampler one(100001, 10, 1), two(100001, 10, 2);
  int same_seed = 0, same_epoch = 0;
  for (int64_t i = 0; i < 1000; ++i) {
    same_seed += one.offset(i) == two.offset(i);
    same_epoch += one.offset(i) == one.offset(i + one.windows());
  }
  // Two random orders of 10,000 windows agree in a given place with probability 1e-4, so in 1000
  // places 0.1 times on average; more than 5 has a probability below 1e-8.
  EXPECT_LE(same_seed, 5);
  EXPECT_LE(same_epoch, 5);
}

// Neighbours in the order must not be neighbours in the text: batches would be correlated.
TEST(SamplerTest, order_is_scattered) {
  const Sampler sampler(100001, 10, 3);
  double sum = 0;
  for (int64_t i = 0; i < 1000; ++i) {
    sum += std::abs(static_cast<double>(sampler.offset(i) - sampler.offset(i + 1))) / 10;
  }
  // |a - b| of two uniform draws below n has mean n / 3 and deviation n / sqrt(18); the mean of
  // 1000 (nearly independent) ones deviates by 0.0075 n: 8 deviations either way.
  EXPECT_NEAR(sum / 1000 / 10000, 1.0 / 3, 0.06);
}

TEST(SamplerTest, too_short_for_one_sequence) {
  EXPECT_EQ(Sampler(11, 10, 0).windows(), 1);
  try {
    Sampler(10, 10, 0);
    FAIL() << "ten tokens have no label for the tenth input";
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(),
                 "data.files: 10 tokens are too few for one sequence: data.seq_len = 10 needs 11");
  }
}

}  // namespace
}  // namespace ppfsdp::train
