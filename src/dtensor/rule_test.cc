#include "src/dtensor/rule.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "src/comm/communicator.h"
#include "src/dtensor/dtensor.h"
#include "src/dtensor/testing.h"

namespace ppfsdp::dtensor {
namespace {

using testing::difference;
using testing::kP;
using testing::kR;
using testing::on_mesh;
using testing::S;

// A rule registered under a name that LibTorch does not have is never asked.
TEST(Rule, every_rule_is_for_an_op_of_libtorch) {
  const std::vector<std::string> names = rule_names();
  EXPECT_GT(names.size(), 300);
  for (const std::string& name : names) {
    const size_t dot = name.find('.');
    const c10::OperatorName op(name.substr(0, dot),
                               dot == std::string::npos ? "" : name.substr(dot + 1));
    EXPECT_TRUE(c10::Dispatcher::singleton().findSchema(op)) << name;
  }
}

/// The placements of the result of `op` on DTensors of these placements.
template <typename Function>
std::string placements_of(const mesh::DeviceMeshPtr& mesh, const Placements& a, const Placements& b,
                          const Function& op) {
  return to_string(spec_of(op(distribute_tensor(at::ones({4, 4}), mesh, a),
                              distribute_tensor(at::ones({4, 4}), mesh, b)))
                       ->placements);
}

// The rules choose what moves least: a partial that need not be reduced is not, and a shard stays.
TEST(Rule, chooses_the_placements_that_move_least) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    const auto add = [](const at::Tensor& a, const at::Tensor& b) { return a + b; };
    const auto mul = [](const at::Tensor& a, const at::Tensor& b) { return a * b; };
    const auto mm = [](const at::Tensor& a, const at::Tensor& b) { return a.mm(b); };
    EXPECT_EQ(placements_of(mesh, {S(0)}, {S(0)}, add), "[Shard(0)]");
    EXPECT_EQ(placements_of(mesh, {S(1)}, {kR}, add), "[Shard(1)]");
    EXPECT_EQ(placements_of(mesh, {kP}, {kP}, add), "[Partial(sum)]");
    EXPECT_EQ(placements_of(mesh, {kP}, {kR}, mul), "[Partial(sum)]");
    EXPECT_EQ(placements_of(mesh, {kP}, {S(0)}, mul), "[Shard(0)]");
    EXPECT_EQ(placements_of(mesh, {kP}, {kP}, mul), "[Partial(sum)]");  // one is reduced
    EXPECT_EQ(placements_of(mesh, {S(1)}, {S(0)}, mm), "[Partial(sum)]");
    EXPECT_EQ(placements_of(mesh, {kR}, {S(1)}, mm), "[Shard(1)]");
    EXPECT_EQ(placements_of(mesh, {S(0)}, {kR}, mm), "[Shard(0)]");
  });
}

TEST(Rule, a_partial_is_reduced_before_what_is_not_linear) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor partial = from_local(at::ones({2}), mesh, {kP});
    EXPECT_EQ(difference(full_tensor(partial.exp()), at::full({2}, 2.0F).exp()), "");
    EXPECT_EQ(difference(full_tensor(partial + 1), at::full({2}, 3.0F)), "");
    EXPECT_EQ(spec_of(at::ones_like(partial))->placements, Placements{kR});
  });
}

// pytorch 162692: the mean of the shards' means is not the mean.
TEST(Rule, mean_of_uneven_shards) {
  on_mesh({4}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor full = at::arange(5, at::kFloat);
    EXPECT_EQ(full_tensor(distribute_tensor(full, mesh, {S(0)}).mean()).item<float>(), 2);
  });
}

TEST(Rule, a_local_dim_of_one_element_is_not_squeezed) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor dtensor = distribute_tensor(at::ones({2, 1}), mesh, {S(0)});
    EXPECT_EQ(dtensor.squeeze().sizes(), at::IntArrayRef({2}));
    EXPECT_EQ(local_of(dtensor.squeeze()).sizes(), at::IntArrayRef({1}));
  });
}

// pytorch 144109, 179502, 194457: rows lost by views of uneven shards.
TEST(Rule, a_view_that_would_move_borders_is_refused_and_a_reshape_moves_them) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor full = at::arange(15, at::kFloat).view({3, 5});
    const at::Tensor dtensor = distribute_tensor(full, mesh, {S(0)});  // 10 and 5 elements
    EXPECT_ANY_THROW(dtensor.view({15}));                              // 8 and 7
    EXPECT_EQ(difference(full_tensor(at::_unsafe_view(dtensor, {15})), full.view({15})), "");
    const at::Tensor even = distribute_tensor(at::arange(8, at::kFloat).view({4, 2}), mesh, {S(0)});
    EXPECT_EQ(spec_of(even.view({8}))->placements, Placements{S(0)});
    EXPECT_TRUE(local_of(even.view({8})).is_alias_of(local_of(even)));
    EXPECT_ANY_THROW(even.as_strided({2}, {1}));
    EXPECT_ANY_THROW(even.slice(0, 0, 2));
  });
}

// Factories keep the placements where the sizes say that they can.
TEST(Rule, factories) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor dtensor = distribute_tensor(at::ones({3, 2}), mesh, {S(0)});
    EXPECT_EQ(spec_of(at::zeros_like(dtensor)), spec_of(dtensor));
    EXPECT_EQ(spec_of(dtensor.new_zeros({3, 2})), spec_of(dtensor));
    EXPECT_EQ(spec_of(dtensor.new_zeros({4}))->placements, Placements{kR});
    EXPECT_EQ(dtensor.new_empty_strided({8, 2}, {1, 8}).strides(), at::IntArrayRef({1, 8}));
    EXPECT_FALSE(is_dtensor(at::zeros({3}, dtensor.options())));
  });
}

TEST(Rule, equal_allclose_and_item_are_the_same_on_every_rank) {
  on_mesh({3}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor a = at::arange(7, at::kFloat);
    const at::Tensor b = a.clone();
    b[6] = 0;  // differs on the last rank only
    const at::Tensor da = distribute_tensor(a, mesh, {S(0)});
    EXPECT_TRUE(at::equal(da, distribute_tensor(a, mesh, {kR})));
    EXPECT_FALSE(at::equal(da, distribute_tensor(b, mesh, {S(0)})));
    EXPECT_FALSE(at::allclose(da, distribute_tensor(b, mesh, {S(0)})));
    EXPECT_FALSE(at::equal(da, distribute_tensor(at::ones({3}), mesh, {S(0)})));
    EXPECT_EQ(da.sum().item<float>(), 21);
    EXPECT_TRUE(da.is_same_size(distribute_tensor(a, mesh, {kR})));
  });
}

// An op without a meta kernel (relu, where, isnan, max) took its results' strides from the local
// ones. A rank with one column or none read them otherwise than the others, viewed what they
// gathered, and the gathering ranks waited for ever.
TEST(Rule, strides_are_the_same_on_every_rank_also_without_a_meta_kernel) {
  for (int64_t world : {2, 3, 5}) {
    on_mesh({world}, [&](const mesh::DeviceMeshPtr& mesh) {
      for (const std::vector<int64_t>& sizes :
           std::vector<std::vector<int64_t>>{{5, 7, 1}, {4, 6, 1}, {0, 3}, {3, 4}, {1, 5, 3}}) {
        const at::Tensor full = testing::integers(sizes, 1);
        for (int64_t dim = 0; dim < full.dim(); ++dim) {
          const at::Tensor x = distribute_tensor(full, mesh, {S(dim)});
          const at::Tensor summed = from_local(full, mesh, {kP});
          const auto check = [&](const at::Tensor& got, const at::Tensor& wanted) {
            EXPECT_EQ(got.strides(), wanted.strides());
            const auto flat = [](const at::Tensor& y) {
              return at::_unsafe_view(y.contiguous(), {y.numel()});
            };
            EXPECT_EQ(difference(full_tensor(flat(got)), flat(wanted)), "");
          };
          check(at::relu(x), at::relu(full));
          check(x.isnan(), full.isnan());
          check(at::where(x > 0, x, 2), at::where(full > 0, full, 2));
          check(at::floor_divide(x, x * x + 1), at::floor_divide(full, full * full + 1));
          check(redistribute(summed, {S(dim)}), full * world);
        }
      }
    });
  }
}

// They read past the end of the sizes.
TEST(Rule, ops_along_a_dim_of_a_tensor_without_dims_are_errors) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor scalar = distribute_tensor(at::ones({}), mesh, {kR});
    EXPECT_THROW(scalar.select(0, 0), c10::Error);
    EXPECT_THROW(scalar.slice(0, 0, 1), c10::Error);
    EXPECT_THROW(scalar.unbind(0), c10::Error);
    EXPECT_THROW(scalar.split(1, 0), c10::Error);
    EXPECT_THROW(scalar.split_with_sizes({1}, 0), c10::Error);
    EXPECT_THROW(at::cat({scalar, scalar}, 0), c10::Error);
    EXPECT_EQ(full_tensor(at::stack({scalar, scalar})).numel(), 2);
    EXPECT_EQ(full_tensor(scalar.sum(0) + scalar.transpose(0, 0)).item<float>(), 2);
  });
}

// A sum whose parts are cut to integers one by one is another sum.
TEST(Rule, copies_cast_the_whole_and_not_its_parts) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor halves = from_local(at::full({3}, 0.5F), mesh, {kP});
    const at::Tensor whole = from_local(at::zeros({3}, at::kInt), mesh, {kP});
    whole.copy_(halves);
    EXPECT_EQ(difference(full_tensor(whole), at::ones({3}, at::kInt)), "");
    const at::Tensor doubles = from_local(at::zeros({3}, at::kDouble), mesh, {kP});
    const uint64_t before = mesh->communicator(0).sequence();
    doubles.copy_(halves);
    EXPECT_EQ(mesh->communicator(0).sequence(), before);
    EXPECT_EQ(difference(full_tensor(doubles), at::ones({3}, at::kDouble)), "");
  });
}

// Stacked with a norm, a whole value was made a partial norm, which loses its sign.
TEST(Rule, norms_are_stacked_with_values_that_are_none_in_one_reduction) {
  on_mesh({2, 3}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor full = at::tensor({3.0F, 4.0F, 0.0F, 0.0F, 0.0F, 0.0F, 0.0F});
    const at::Tensor both = distribute_tensor(full, mesh, {S(0), S(0)}).norm();
    const at::Tensor one = distribute_tensor(full, mesh, {S(0), kR}).norm();
    const at::Tensor whole = distribute_tensor(at::full({}, -2.0F), mesh, {kR, kR});
    const uint64_t before = mesh->communicator(0).sequence() + mesh->communicator(1).sequence();
    const at::Tensor stacked = full_tensor(at::stack({both, whole, one, at::full({}, -3.0F)}));
    EXPECT_EQ(mesh->communicator(0).sequence() + mesh->communicator(1).sequence() - before, 2);
    EXPECT_EQ(difference(stacked, at::tensor({5.0F, -2.0F, 5.0F, -3.0F})), "");
    const at::Tensor cubes =
        distribute_tensor(full, mesh, {S(0), kR}).abs().add(1).norm(-1, 0, true);
    EXPECT_FLOAT_EQ(full_tensor(at::cat({whole.view({1}), cubes}))[1].item<float>(),
                    (full + 1).norm(-1).item<float>());
    EXPECT_EQ(full_tensor(at::cat({whole.view({1}), cubes}))[0].item<float>(), -2);
  });
}

// 65504 is the largest number of float16: the sum of 2 * 40000 ones is not in it, their mean is.
TEST(Rule, the_mean_of_halves_does_not_overflow) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor ones = distribute_tensor(at::ones({2, 70000}, at::kHalf), mesh, {S(0)});
    EXPECT_EQ(full_tensor(ones.mean()).item<float>(), 1);
    EXPECT_EQ(ones.mean().scalar_type(), at::kHalf);
  });
}

// One plan for a plain operand and for its transpose gave the second result the first's strides.
TEST(Rule, plans_tell_plain_operands_of_other_strides_apart) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor full = testing::integers({3, 3}, 1);
    const at::Tensor scalar = distribute_tensor(at::ones({}), mesh, {kR});
    for (const at::Tensor& plain : {full, full.t(), full}) {
      EXPECT_EQ((scalar * plain).strides(), plain.strides());
      EXPECT_EQ(difference(full_tensor((scalar * plain).reshape({9})), plain.reshape({9})), "");
    }
  });
}

// A StridedShard of which two splits to the right remain, that multiply to another number.
TEST(Rule, a_strided_shard_that_fits_no_more_becomes_a_shard) {
  on_mesh({2, 2, 3}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor full = testing::integers({13, 6}, 1);
    const at::Tensor a =
        distribute_tensor(full, mesh, {Placement::strided_shard(0, 2), S(0), S(0)});
    const at::Tensor b = distribute_tensor(full, mesh, {kR, S(1), S(1)});
    EXPECT_EQ(difference(full_tensor(a + b), full * 2), "");
    EXPECT_EQ(difference(full_tensor(b + a), full * 2), "");
    EXPECT_EQ(difference(full_tensor(a.mm(b.t())), full.mm(full.t())), "");
    EXPECT_EQ(difference(full_tensor(b.clone().add_(a)), full * 2), "");
  });
}

// What was reduced once is remembered. It is whole, and no one's part of a sum; and a write through
// the tensor or a view of it makes it out of date.
TEST(Rule, a_remembered_value_is_whole_and_up_to_date) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor mean =
        from_local(at::full({}, 3.0F), mesh, {Placement::partial(Placement::PartialOp::kAvg)});
    const at::Tensor sum = from_local(at::full({}, 3.0F), mesh, {kP});
    EXPECT_EQ(mean.item<float>(), 3);
    EXPECT_EQ(full_tensor(sum + mean).item<float>(), 9);
    EXPECT_EQ(full_tensor(mean - sum).item<float>(), -3);
    sum.mul_(2);
    EXPECT_EQ(sum.item<float>(), 12);
    sum.detach().mul_(2);
    EXPECT_EQ(sum.item<float>(), 24);
    sum.unsqueeze(0).mul_(2);
    EXPECT_EQ(sum.item<float>(), 48);
    const uint64_t before = mesh->communicator(0).sequence();
    EXPECT_EQ(sum.item<float>(), 48);
    EXPECT_EQ(mesh->communicator(0).sequence(), before);
  });
}

// In-place changes of sizes would leave the global ones stale.
TEST(Rule, in_place_changes_of_shape_are_errors) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    at::Tensor dtensor = distribute_tensor(at::ones({2, 2}), mesh, {S(0)});
    EXPECT_ANY_THROW(dtensor.t_());
    EXPECT_ANY_THROW(dtensor.unsqueeze_(0));
    EXPECT_ANY_THROW(dtensor.squeeze_());
    EXPECT_ANY_THROW(dtensor.transpose_(0, 1));
    EXPECT_ANY_THROW(dtensor.resize_({3}));
    EXPECT_ANY_THROW(dtensor.set_());
    EXPECT_EQ(dtensor.sizes(), at::IntArrayRef({2, 2}));
    at::Tensor plain = at::empty({0});
    EXPECT_ANY_THROW(at::add_out(plain, dtensor, dtensor));
    EXPECT_EQ(plain.numel(), 0);
  });
}

}  // namespace
}  // namespace ppfsdp::dtensor
