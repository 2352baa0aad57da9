// Skipping leaves the state that drawing leaves, byte for byte: a later value, or a saved
// generator, would differ otherwise.
#include "src/dtensor/random_skip.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace ppfsdp::dtensor {
namespace {

bool same(const at::mt19937_data_pod& a, const at::mt19937_data_pod& b) {
  return a.seed_ == b.seed_ && a.left_ == b.left_ && a.seeded_ == b.seeded_ && a.next_ == b.next_ &&
         a.state_ == b.state_;
}

at::mt19937_data_pod drawn(const at::mt19937_data_pod& start, uint64_t count) {
  at::mt19937 engine;
  engine.set_data(start);
  for (uint64_t i = 0; i < count; ++i) {
    engine();
  }
  return engine.data();
}

at::mt19937_data_pod skipped(at::mt19937_data_pod start, uint64_t count) {
  skip_draws(start, count);
  return start;
}

TEST(RandomSkip, equals_drawing_at_every_edge_of_the_state) {
  for (const uint64_t before : {0, 1, 2, 400, 622, 623, 624, 625, 1247, 1248}) {
    const at::mt19937_data_pod start = drawn(at::mt19937(7).data(), before);
    for (const uint64_t count :
         {0, 1, 2, 223, 224, 225, 622, 623, 624, 625, 1247, 1248, 1249, 6240, 100000}) {
      EXPECT_TRUE(same(skipped(start, count), drawn(start, count))) << count << " after " << before;
    }
  }
}

// Long enough for the jump, which has nothing in common with stepping.
TEST(RandomSkip, a_jump_equals_drawing) {
  for (const uint64_t before : {0, 311}) {
    const at::mt19937_data_pod start = drawn(at::mt19937(99).data(), before);
    for (const uint64_t count : {2555904, 5200001, 20000000}) {
      EXPECT_TRUE(same(skipped(start, count), drawn(start, count))) << count << " after " << before;
    }
  }
}

// Far more draws than can be made: two jumps and one of their sum must agree.
TEST(RandomSkip, jumps_add_up) {
  const at::mt19937_data_pod start = drawn(at::mt19937(5).data(), 17);
  const uint64_t first = uint64_t{1} << 40;
  const uint64_t second = 987654321987;
  EXPECT_TRUE(same(skipped(skipped(start, first), second), skipped(start, first + second)));
  EXPECT_FALSE(same(skipped(start, first), skipped(start, first + 1)));
}

}  // namespace
}  // namespace ppfsdp::dtensor
