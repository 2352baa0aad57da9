#include "src/dtensor/dtensor.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include "src/dtensor/testing.h"

namespace ppfsdp::dtensor {
namespace {

using testing::difference;
using testing::integers;
using testing::kP;
using testing::kR;
using testing::on_mesh;
using testing::S;

template <typename Function>
std::string error_of(const Function& function) {
  try {
    function();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

// A shard with the wrong rows, or padding left in, would not give the tensor back.
TEST(DTensor, distributes_and_gathers_uneven_and_empty_shards) {
  for (int64_t world : {1, 2, 3, 4, 5}) {
    on_mesh({world}, [](const mesh::DeviceMeshPtr& mesh) {
      for (const std::vector<int64_t>& sizes :
           std::vector<std::vector<int64_t>>{{7, 3}, {1, 4}, {8, 5}, {0, 3}, {2, 2, 3}}) {
        for (int64_t dim = 0; dim < static_cast<int64_t>(sizes.size()); ++dim) {
          const at::Tensor full = integers(sizes, 1);
          const at::Tensor dtensor = distribute_tensor(full, mesh, {S(dim)});
          EXPECT_TRUE(is_dtensor(dtensor));
          EXPECT_EQ(dtensor.sizes(), full.sizes());
          EXPECT_EQ(difference(full_tensor(dtensor), full), "");
        }
      }
    });
  }
}

// If plain tensors counted as DTensors, or the metadata were the shard's, code that branches on
// them would go wrong.
TEST(DTensor, has_global_metadata_and_no_memory) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor dtensor = distribute_tensor(integers({3, 4}, 1), mesh, {S(0)});
    EXPECT_FALSE(is_dtensor(integers({3, 4}, 1)));
    EXPECT_FALSE(is_dtensor(at::Tensor()));
    EXPECT_EQ(dtensor.numel(), 12);
    EXPECT_EQ(dtensor.strides(), at::IntArrayRef({4, 1}));
    EXPECT_TRUE(dtensor.is_cpu());
    EXPECT_FALSE(dtensor.is_meta());
    EXPECT_TRUE(dtensor.is_contiguous());
    EXPECT_FALSE(dtensor.has_storage());
    EXPECT_ANY_THROW(dtensor.data_ptr());
    EXPECT_EQ(local_of(dtensor).size(0), mesh->coordinate(0) == 0 ? 2 : 1);
    EXPECT_EQ(spec_of(dtensor)->placements, Placements{S(0)});
  });
}

// from_local must share memory (FSDP's optimizer writes through it) and refuse a part that is not
// one.
TEST(DTensor, from_local_shares_memory_and_checks_sizes) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor local = at::zeros({mesh->coordinate(0) == 0 ? 2 : 1, 4});
    const at::Tensor dtensor = from_local(local, mesh, {S(0)}, at::IntArrayRef({3, 4}));
    dtensor.add_(1);
    EXPECT_EQ(difference(local, at::ones_like(local)), "");
    const std::string error = error_of([&] {
      from_local(at::zeros({3, 4}), mesh, {S(0)}, at::IntArrayRef({3, 4}));
    });
    EXPECT_NE(error.find("got a local part of sizes [3, 4]"), std::string::npos) << error;
    EXPECT_NE(error_of([&] { from_local(local, mesh, {S(2)}); }).find("out of range"),
              std::string::npos);
    EXPECT_NE(error_of([&] {
                from_local(local, mesh, {S(0), S(1)});
              }).find("one placement"),
              std::string::npos);
  });
}

// A maximum of sums is no sum of maxima: what such a tensor's value is would depend on where it
// goes.
TEST(DTensor, partials_that_have_no_one_value_are_errors) {
  using Op = Placement::PartialOp;
  on_mesh({2, 2}, [](const mesh::DeviceMeshPtr& mesh) {
    const Placement max = Placement::partial(Op::kMax);
    const Placement avg = Placement::partial(Op::kAvg);
    const auto from = [&](const Placements& placements, at::ScalarType dtype) {
      return error_of([&] { from_local(at::ones({2}, dtype), mesh, placements); });
    };
    EXPECT_NE(from({max, kP}, at::kFloat).find("mixes reductions"), std::string::npos);
    EXPECT_NE(from({Placement::partial(Op::kNorm), kP}, at::kFloat).find("mixes reductions"),
              std::string::npos);
    EXPECT_NE(from({kP, kR}, at::kBool).find("is not for Bool"), std::string::npos);
    EXPECT_NE(from({avg, kR}, at::kLong).find("needs a floating-point dtype"), std::string::npos);
    EXPECT_EQ(from({kP, avg}, at::kFloat), "no error");
    EXPECT_EQ(from({max, max}, at::kBool), "no error");
    EXPECT_EQ(from({kP, kP}, at::kLong), "no error");
    const at::Tensor whole = distribute_tensor(at::ones({2}), mesh, {kR, kR});
    EXPECT_NE(error_of([&] {
                redistribute(whole, {max, kP});
              }).find("redistribute: "),
              std::string::npos);
    EXPECT_ANY_THROW(distribute_tensor(at::ones({2}), mesh, {kP, max}));
  });
}

// Contiguous parts are parts of a contiguous tensor, whatever their strides say of dims of one
// element; otherwise this rank would view what the others have to gather.
TEST(DTensor, from_local_of_contiguous_parts_is_contiguous_on_every_rank) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    const int64_t columns = mesh->coordinate(0) == 0 ? 2 : 1;
    const at::Tensor local = at::ones({columns, 4}).t().contiguous();  // one column: strides (1, 4)
    const at::Tensor dtensor = from_local(local, mesh, {S(1)}, at::IntArrayRef({4, 3}));
    EXPECT_EQ(dtensor.strides(), at::IntArrayRef({3, 1}));
    EXPECT_EQ(full_tensor(at::_unsafe_view(dtensor, {12})).numel(), 12);
  });
}

TEST(DTensor, distribute_tensor_makes_leaves_of_leaves_only) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor leaf = at::ones({4}).requires_grad_();
    const at::Tensor inner = leaf * 2;
    EXPECT_FALSE(distribute_tensor(inner, mesh, {S(0)}).is_leaf());
    const at::NoGradGuard no_grad;
    EXPECT_TRUE(distribute_tensor(leaf, mesh, {S(0)}).requires_grad());
    EXPECT_FALSE(distribute_tensor(inner, mesh, {S(0)}).requires_grad());
  });
}

TEST(DTensor, to_string_shows_the_local_part) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor dtensor = distribute_tensor(at::ones({4, 3}), mesh, {S(0)});
    EXPECT_EQ(to_string(dtensor).rfind(
                  "DTensor(local=[2, 3] of [4, 3], Float, DeviceMesh(2), [Shard(0)])\n 1  1  1", 0),
              0)
        << to_string(dtensor);
  });
}

}  // namespace
}  // namespace ppfsdp::dtensor
