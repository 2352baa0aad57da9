#include "src/dtensor/redistribute.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "src/comm/communicator.h"
#include "src/dtensor/dtensor.h"
#include "src/dtensor/testing.h"

namespace ppfsdp::dtensor {
namespace {

using testing::difference;
using testing::integers;
using testing::kP;
using testing::kR;
using testing::on_mesh;
using testing::S;
using Op = Placement::PartialOp;

Placement SS(int64_t dim, int64_t factor) { return Placement::strided_shard(dim, factor); }

/// The part of `full` that this rank holds in placements without Partial.
at::Tensor part_of(const at::Tensor& full, const mesh::DeviceMesh& mesh,
                   const Placements& placements) {
  at::Tensor part = full;
  const auto ranges = local_ranges(full.sizes(), mesh, placements, mesh.coordinates());
  for (size_t dim = 0; dim < ranges.size(); ++dim) {
    part = part.narrow(static_cast<int64_t>(dim), ranges[dim].offset, ranges[dim].length);
  }
  return part;
}

/// From every placements to every other; both ends must be the whole tensor, and where nothing is
/// partial each rank must hold exactly its part. Integers make every sum exact.
void check_pairs(const std::vector<int64_t>& mesh_shape, const std::vector<int64_t>& sizes,
                 const std::vector<Placements>& all) {
  on_mesh(mesh_shape, [&](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor full = integers(sizes, 5);
    for (const Placements& from : all) {
      const at::Tensor source = distribute_tensor(full, mesh, from);
      for (const Placements& to : all) {
        const at::Tensor result = redistribute(source, to);
        const std::string what = to_string(from) + " -> " + to_string(to);
        EXPECT_EQ(spec_of(result)->placements, to) << what;
        EXPECT_EQ(difference(full_tensor(result), full), "") << what;
        bool partial = false;
        for (const Placement& placement : to) {
          partial = partial || placement.is_partial();
        }
        if (!partial) {
          EXPECT_EQ(difference(local_of(result), part_of(full, *mesh, to)), "") << what;
        }
      }
    }
  });
}

TEST(Redistribute, every_pair_on_one_dim) {
  for (int64_t world : {1, 2, 3, 5}) {
    for (const auto& sizes : std::vector<std::vector<int64_t>>{{7, 4}, {2, 6}, {1, 1}, {0, 5}}) {
      check_pairs({world}, sizes,
                  {{kR},
                   {S(0)},
                   {S(1)},
                   {kP},
                   {Placement::partial(Op::kMax)},
                   {Placement::partial(Op::kMin)}});
    }
  }
}

TEST(Redistribute, every_pair_on_two_dims) {
  std::vector<Placements> all;
  for (const Placement& a : {kR, S(0), S(1), kP}) {
    for (const Placement& b : {kR, S(0), S(1), kP}) {
      all.push_back({a, b});
    }
  }
  all.push_back({SS(0, 3), S(0)});
  all.push_back({SS(1, 3), S(1)});
  check_pairs({2, 3}, {7, 5}, all);
  check_pairs({2, 3}, {2, 9}, all);
}

TEST(Redistribute, three_dims_with_nested_splits) {
  check_pairs({2, 2, 2}, {9, 3},
              {{kR, kR, kR},
               {S(0), S(0), S(0)},
               {S(0), kR, S(0)},
               {kR, SS(0, 2), S(0)},
               {SS(0, 4), SS(0, 2), S(0)},
               {S(1), S(0), kP},
               {kP, S(0), S(1)}});
}

// FSDP of 4 over tensor parallelism of 2 on 9 rows: rank (i, j) must hold part i of tensor-parallel
// part j, not part j of a contiguous split.
TEST(Redistribute, strided_shards_are_parts_of_the_right_dims_parts) {
  on_mesh({4, 2}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor full = at::arange(9, at::kFloat);
    const at::Tensor dtensor = distribute_tensor(full, mesh, {SS(0, 2), S(0)});
    const ShardRange outer = shard_range(9, 2, mesh->coordinate(1));
    const ShardRange inner = shard_range(outer.length, 4, mesh->coordinate(0));
    EXPECT_EQ(
        difference(local_of(dtensor), full.narrow(0, outer.offset + inner.offset, inner.length)),
        "");
    EXPECT_EQ(difference(full_tensor(dtensor), full), "");
    EXPECT_ANY_THROW(distribute_tensor(full, mesh, {SS(0, 3), S(0)}));
  });
}

// Each is one collective at most; a slice is none. More would be bytes for nothing.
TEST(Redistribute, uses_the_fewest_collectives) {
  on_mesh({4}, [](const mesh::DeviceMeshPtr& mesh) {
    const auto count = [&](const Placement& from, const Placement& to) {
      const at::Tensor source = distribute_tensor(integers({8, 4}, 1), mesh, {from});
      const uint64_t before = mesh->communicator(0).sequence();
      redistribute(source, {to});
      return mesh->communicator(0).sequence() - before;
    };
    EXPECT_EQ(count(kR, S(0)), 0);
    EXPECT_EQ(count(kR, kP), 0);
    EXPECT_EQ(count(S(0), kP), 0);
    EXPECT_EQ(count(S(0), kR), 1);
    EXPECT_EQ(count(S(0), S(1)), 1);
    EXPECT_EQ(count(kP, kR), 1);
    EXPECT_EQ(count(kP, S(1)), 1);
  });
}

TEST(Redistribute, partials_reduce_as_their_operation_says) {
  on_mesh({4}, [](const mesh::DeviceMeshPtr& mesh) {
    const float rank = static_cast<float>(mesh->coordinate(0));
    const at::Tensor local = at::full({2}, rank + 1);  // 1, 2, 3, 4
    const auto reduced = [&](const Placement& partial) {
      return full_tensor(from_local(local, mesh, {partial})).select(0, 1).item<float>();
    };
    EXPECT_EQ(reduced(kP), 10);
    EXPECT_EQ(reduced(Placement::partial(Op::kAvg)), 2.5);
    EXPECT_EQ(reduced(Placement::partial(Op::kMax)), 4);
    EXPECT_EQ(reduced(Placement::partial(Op::kMin)), 1);
    EXPECT_FLOAT_EQ(reduced(Placement::partial(Op::kNorm, 2)), std::sqrt(30.0F));
    EXPECT_FLOAT_EQ(reduced(Placement::partial(Op::kNorm, 3)), std::cbrt(100.0F));
    const at::Tensor scattered =
        redistribute(from_local(local, mesh, {Placement::partial(Op::kNorm, 2)}), {S(0)});
    EXPECT_EQ(difference(full_tensor(scattered),
                         full_tensor(from_local(local, mesh, {Placement::partial(Op::kNorm, 2)}))),
              "");
  });
}

// A -0 that comes back as 0 is another bit pattern: 1 / x tells them apart.
TEST(Redistribute, replicate_to_partial_keeps_the_sign_of_zero) {
  on_mesh({3}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor full = at::full({2}, -0.0F);
    const at::Tensor back = full_tensor(redistribute(distribute_tensor(full, mesh, {kR}), {kP}));
    EXPECT_TRUE(back.signbit().all().item<bool>());
  });
}

// A slice of what was gathered on the way would keep the gathered tensor alive.
TEST(Redistribute, the_result_keeps_no_more_memory_than_it_needs) {
  on_mesh({2, 2}, [](const mesh::DeviceMeshPtr& mesh) {
    const std::vector<Placements> all = {{S(0), S(0)}, {S(0), kR},   {kR, S(0)}, {kP, S(1)},
                                         {kR, kR},     {S(1), S(0)}, {kP, kP},   {SS(0, 2), S(0)}};
    for (const Placements& from : all) {
      const at::Tensor source = distribute_tensor(integers({8, 8}, 1), mesh, from);
      for (const Placements& to : all) {
        const at::Tensor result = redistribute(source, to);
        const at::Tensor& local = local_of(result);
        EXPECT_EQ(local.storage().nbytes(), static_cast<size_t>(local.numel()) * sizeof(float))
            << to_string(from) << " -> " << to_string(to);
      }
    }
  });
}

// The value of a norm of negative order stood beside zeros, whose norm of that order is zero.
TEST(Redistribute, replicate_to_a_norm_of_negative_order_and_back) {
  on_mesh({3}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor full = at::full({2}, 3.0F);
    for (double order : {-2.0, -1.0, 1.0, 3.0}) {
      const Placements norm = {Placement::partial(Op::kNorm, order)};
      EXPECT_FLOAT_EQ(
          full_tensor(redistribute(distribute_tensor(full, mesh, {kR}), norm))[1].item<float>(), 3);
    }
  });
}

// Added to a number that LibTorch has wrapped, a partial sum became double on all ranks but one,
// whose neutral number was no wrapped one.
TEST(Redistribute, a_wrapped_number_stays_one) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor number = at::scalar_tensor(1.5, at::kDouble);
    number.unsafeGetTensorImpl()->set_wrapped_number(true);
    const at::Tensor sum = from_local(at::ones({}), mesh, {kP}) + number;
    EXPECT_EQ(sum.scalar_type(), at::kFloat);
    EXPECT_EQ(full_tensor(sum).item<float>(), 3.5);
  });
}

// A slice that shared the source's memory would let a write to the one change the other.
TEST(Redistribute, the_result_has_memory_of_its_own) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor source = distribute_tensor(integers({4, 2}, 1), mesh, {kR});
    redistribute(source, {S(0)}).zero_();
    EXPECT_EQ(difference(full_tensor(source), integers({4, 2}, 1)), "");
  });
}

}  // namespace
}  // namespace ppfsdp::dtensor
