#include "src/optim/neighbours.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

namespace ppfsdp::optim {
namespace {

// A run that is cut short costs time; one that is too long writes to memory that is not a
// parameter's.
TEST(Neighbours, JoinsRunsAndNothingElse) {
  const at::Tensor memory = at::arange(20, at::kFloat);
  const at::Tensor a = memory.narrow(0, 0, 6).view({2, 3}), b = memory.narrow(0, 6, 2),
                   after_gap = memory.narrow(0, 9, 4).view({4, 1}), c = memory.narrow(0, 13, 3),
                   strided = memory.narrow(0, 16, 4).view({2, 2}).t(), elsewhere = at::zeros({3});
  const auto joined = join_neighbours({a, b, after_gap, c, strided, elsewhere});
  ASSERT_EQ(joined.size(), 4u);
  EXPECT_TRUE(at::equal(joined[0], memory.narrow(0, 0, 8)));
  EXPECT_EQ(joined[0].data_ptr(), memory.data_ptr());
  EXPECT_TRUE(at::equal(joined[1], memory.narrow(0, 9, 7)));
  EXPECT_TRUE(joined[2].is_same(strided));
  EXPECT_TRUE(joined[3].is_same(elsewhere));
}

// Order decides which elements belong together in several lists: neighbours the other way round, or
// a tensor twice, are no run.
TEST(Neighbours, KeepsTheOrder) {
  const at::Tensor memory = at::arange(6, at::kFloat);
  const at::Tensor a = memory.narrow(0, 0, 3), b = memory.narrow(0, 3, 3);
  EXPECT_EQ(join_neighbours({b, a}).size(), 2u);
  EXPECT_EQ(join_neighbours({a, a}).size(), 2u);
  EXPECT_EQ(join_neighbours({a, b}).size(), 1u);
  EXPECT_TRUE(join_neighbours({}).empty());
  EXPECT_FALSE(follows(a, b.view(at::kInt)));
}

}  // namespace
}  // namespace ppfsdp::optim
