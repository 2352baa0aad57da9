#include "src/dtensor/sharding.h"

#include <gtest/gtest.h>

#include "src/dtensor/testing.h"

namespace ppfsdp::dtensor {
namespace {

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

TEST(WithFittingSplits, makes_a_shard_of_what_fits_no_more) {
  const auto S = Placement::shard(0);
  const auto R = Placement::replicate();
  const auto SS = Placement::strided_shard(0, 2);
  EXPECT_EQ(with_fitting_splits({2, 2, 3}, {SS, S, S}), (Placements{SS, S, S}));
  EXPECT_EQ(with_fitting_splits({2, 2, 3}, {SS, R, S}), (Placements{S, R, S}));
  EXPECT_EQ(with_fitting_splits({2, 2, 3}, {SS, S, R}), (Placements{SS, S, R}));
  EXPECT_EQ(with_fitting_splits({2, 2}, {SS, Placement::shard(1)}),
            (Placements{S, Placement::shard(1)}));
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
  EXPECT_EQ(global_strides({2, 2}, {2, 2}, {3, 2}), (Strides{3, 2}));  // every second of 3 columns
  EXPECT_EQ(global_strides({4, 2}, {2, 2}, {3, 2}), (Strides{3, 2}));
  EXPECT_EQ(global_strides({}, {}, {}), (Strides{}));
}

// The parts must tile the tensor: a row in two parts or in none is a wrong checkpoint.
TEST(LocalRanges, tile_the_tensor_for_nested_and_strided_splits) {
  const auto S = Placement::shard(0);
  testing::on_mesh({2, 3}, [&](const mesh::DeviceMeshPtr& mesh) {
    for (const Placements& placements :
         {Placements{S, S}, Placements{Placement::strided_shard(0, 3), S}}) {
      for (int64_t size = 0; size < 14; ++size) {
        std::vector<int> held(size);
        for (int64_t rank = 0; rank < mesh->size(); ++rank) {
          const ShardRange range =
              local_ranges({size}, *mesh, placements, coordinates_of(mesh->shape(), rank))[0];
          for (int64_t row = range.offset; row < range.offset + range.length; ++row) {
            ++held[row];
          }
        }
        EXPECT_EQ(held, std::vector<int>(size, 1));
      }
    }
  });
}

}  // namespace
}  // namespace ppfsdp::dtensor
