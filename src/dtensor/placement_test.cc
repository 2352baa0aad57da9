#include "src/dtensor/placement.h"

#include <gtest/gtest.h>

#include <cmath>

#include "src/dtensor/sharding.h"

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

TEST(ShardOrder, a_strided_shard_comes_after_the_dims_that_it_strides_over) {
  const auto S = Placement::shard(0);
  const auto SS = [](int64_t factor) { return Placement::strided_shard(0, factor); };
  using Order = std::vector<int64_t>;
  EXPECT_EQ(shard_order({2, 3}, {S, S}, 0), (Order{0, 1}));
  EXPECT_EQ(shard_order({2, 3}, {SS(3), S}, 0), (Order{1, 0}));
  EXPECT_EQ(shard_order({2, 2, 3}, {SS(6), SS(3), S}, 0), (Order{2, 1, 0}));
  EXPECT_EQ(shard_order({2, 2, 3}, {SS(2), S, S}, 0), (Order{1, 0, 2}));
  EXPECT_ANY_THROW(shard_order({2, 3}, {SS(2), S}, 0));
}

// Strides tell LibTorch whether a tensor can be viewed; if they said so wrongly, reshape of a part
// with gaps would throw, or a transposed one would be taken for what it is not.
TEST(GlobalStrides, keep_the_order_of_dims_and_their_gaps) {
  using Strides = std::vector<int64_t>;
  EXPECT_EQ(global_strides({4, 6}, {2, 6}, {6, 1}), (Strides{6, 1}));
  EXPECT_EQ(global_strides({4, 6}, {2, 6}, {1, 2}), (Strides{1, 4}));
  EXPECT_EQ(global_strides({4, 3}, {2, 3}, {6, 1}), (Strides{6, 1}));   // half the columns
  EXPECT_EQ(global_strides({4}, {2}, {6}), (Strides{6}));               // one column
  EXPECT_EQ(global_strides({2, 6}, {2, 3}, {6, 1}), (Strides{12, 1}));  // every second row
  EXPECT_EQ(global_strides({4, 6}, {4, 3}, {0, 1}), (Strides{0, 1}));
  EXPECT_EQ(global_strides({}, {}, {}), (Strides{}));
}

}  // namespace
}  // namespace ppfsdp::dtensor
