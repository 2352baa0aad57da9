#include "src/dtensor/placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

namespace ppfsdp::dtensor {
namespace {

// torch.chunk's rule: a rank with one row too many or too few breaks every checkpoint and gather.
TEST(ShardRange, covers_the_dim_as_torch_chunk_does) {
  for (int64_t size = 0; size < 20; ++size) {
    for (int64_t count = 1; count < 9; ++count) {
      int64_t next = 0;
      for (int64_t index = 0; index < count; ++index) {
        const ShardRange range = shard_range(size, count, index);
        EXPECT_EQ(range.offset, next);
        EXPECT_EQ(range.length, std::min((size + count - 1) / count, size - next));
        next += range.length;
      }
      EXPECT_EQ(next, size);
    }
  }
}

TEST(Placement, says_what_it_is) {
  EXPECT_EQ(to_string({Placement::replicate(), Placement::shard(1), Placement::strided_shard(0, 2),
                       Placement::partial(), Placement::partial(Placement::PartialOp::kNorm, 2)}),
            "[Replicate(), Shard(1), StridedShard(0, split_factor=2), Partial(sum), "
            "Partial(norm 2)]");
}

// An order that is no norm's would give inf or NaN only when it is reduced.
TEST(Placement, refuses_what_has_no_meaning) {
  using Op = Placement::PartialOp;
  EXPECT_ANY_THROW(Placement::partial(Op::kNorm, INFINITY));
  EXPECT_ANY_THROW(Placement::partial(Op::kNorm, 0));
  EXPECT_ANY_THROW(Placement::partial(Op::kNone));
  EXPECT_ANY_THROW(Placement::strided_shard(0, 0));
}

}  // namespace
}  // namespace ppfsdp::dtensor
