#include "src/dtensor/rule.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

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
