#include "src/train/compare.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "sim/mesh/world.h"
#include "src/dtensor/dtensor.h"
#include "src/mesh/device_mesh.h"

namespace ppfsdp::train {
namespace {

at::Tensor tensor(const std::vector<float>& values) { return at::tensor(values); }

TEST(CompareTest, equal_bits_are_no_difference) {
  const float nan = std::nanf("");
  const TensorDifference none = compare_bits(tensor({1, nan, -0.0f}), tensor({1, nan, -0.0f}));
  EXPECT_EQ(none.first, std::nullopt);
  EXPECT_EQ(none.max_ulps, 0u);
  EXPECT_EQ(none.max_abs, 0.0);
}

TEST(CompareTest, counts_float_steps_across_zero) {
  const float tiny = std::numeric_limits<float>::denorm_min();
  const TensorDifference across = compare_bits(tensor({5, tiny}), tensor({5, -tiny}));
  EXPECT_EQ(across.first, 1);
  EXPECT_EQ(across.max_ulps, 2u);
  const float next = std::nextafter(std::nextafter(1.0f, 2.0f), 2.0f);
  const TensorDifference two = compare_bits(tensor({next, 0, 8}), tensor({1, 0, 8.5}));
  EXPECT_EQ(two.first, 0);
  EXPECT_EQ(two.max_ulps, 524288u) << "8 and 8.5: half of the 2^20 steps from 8 to 9";
  EXPECT_EQ(two.max_abs, 0.5);
}

// A sign of zero or a NaN that comes or goes must not be taken for equality.
TEST(CompareTest, zeros_and_nans) {
  EXPECT_EQ(compare_bits(tensor({0.0f}), tensor({-0.0f})).first, 0);
  const TensorDifference lost = compare_bits(tensor({1, std::nanf("")}), tensor({1, 2}));
  EXPECT_EQ(lost.first, 1);
  EXPECT_EQ(lost.max_ulps, std::numeric_limits<uint32_t>::max());
  EXPECT_TRUE(std::isinf(lost.max_abs));
}

TEST(CompareTest, refuses_other_shapes_and_dtypes) {
  EXPECT_THROW(compare_bits(at::zeros({2, 3}), at::zeros({3, 2})), c10::Error);
  EXPECT_THROW(compare_bits(at::zeros({2}, at::kDouble), at::zeros({2})), c10::Error);
}

TEST(CompareTest, coordinates_of_an_index) {
  EXPECT_EQ(coordinates({4, 3}, 7), "[2, 1]");
  EXPECT_EQ(coordinates({5}, 4), "[4]");
}

// Five rows over three ranks are 2, 2 and 1.
TEST(CompareTest, rank_of_an_element_follows_the_shards) {
  EXPECT_EQ(rank_of_element(at::zeros({5, 2}), 9), 0);
  sim::run_world(3, {}, [](comm::Runtime& runtime) {
    const auto mesh = mesh::DeviceMesh::create(runtime, {3});
    const at::Tensor whole = at::arange(10, at::kFloat).view({5, 2});
    const at::Tensor sharded =
        dtensor::distribute_tensor(whole, mesh, {dtensor::Placement::shard(0)});
    std::vector<int> ranks;
    for (int64_t i = 0; i < 10; ++i) ranks.push_back(rank_of_element(sharded, i));
    EXPECT_EQ(ranks, (std::vector<int>{0, 0, 0, 0, 1, 1, 1, 1, 2, 2}));
    const at::Tensor replicated =
        dtensor::distribute_tensor(whole, mesh, {dtensor::Placement::replicate()});
    EXPECT_EQ(rank_of_element(replicated, 9), 0);
  });
}

}  // namespace
}  // namespace ppfsdp::train
