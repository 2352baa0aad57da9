// Autograd through DTensors, and the traps that prototypes found: each test would fail if
// LibTorch's autograd took a DTensor for the plain tensor that its sizes suggest.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>

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

at::Tensor leaf(const at::Tensor& tensor) { return tensor.detach().clone().requires_grad_(); }

/// Runs `function` on a plain leaf and on a sharded one, backward from its sum, and compares the
/// gradients. Integers make every sum exact.
void same_gradient(const mesh::DeviceMeshPtr& mesh, const at::Tensor& full,
                   const Placements& placements,
                   const std::function<at::Tensor(const at::Tensor&)>& function) {
  const at::Tensor plain = leaf(full);
  const at::Tensor sharded = distribute_tensor(plain, mesh, placements);
  function(plain).sum().backward();
  function(sharded).sum().backward();
  ASSERT_TRUE(is_dtensor(sharded.grad()));
  EXPECT_EQ(spec_of(sharded.grad())->placements, placements);
  EXPECT_EQ(difference(full_tensor(sharded.grad()), plain.grad()), "");
}

TEST(Autograd, gradients_equal_the_plain_ones_in_the_parameters_placements) {
  for (int64_t world : {1, 2, 3}) {
    on_mesh({world}, [](const mesh::DeviceMeshPtr& mesh) {
      const at::Tensor other = integers({5, 4}, 2);
      for (const Placement& placement : {kR, S(0), S(1)}) {
        const Placements placements = {placement};
        const at::Tensor full = integers({5, 4}, 1);
        const auto check = [&](const std::function<at::Tensor(const at::Tensor&)>& function) {
          same_gradient(mesh, full, placements, function);
        };
        check([](const at::Tensor& x) { return x * x; });
        check([&](const at::Tensor& x) { return x * other + x; });
        check([](const at::Tensor& x) { return x.abs().clamp_min(2); });
        check([](const at::Tensor& x) { return x.t().mm(x); });
        check([](const at::Tensor& x) { return std::get<0>(x.max(1)); });
        check([](const at::Tensor& x) { return x.amax() * x; });
        check([](const at::Tensor& x) { return x.unsqueeze(0).expand({3, 5, 4}).mul(2); });
        check([](const at::Tensor& x) { return at::cat({x, x * 2}, 1); });
        check([](const at::Tensor& x) { return at::stack({x, x * 3}); });
        check([](const at::Tensor& x) { return x.sum(0) * x.sum(1, true); });
        check([](const at::Tensor& x) { return at::where(x > 0, x * 2, x * 3); });
        check([](const at::Tensor& x) { return x.clone().mul_(3).add_(x); });
      }
    });
  }
}

// `split`'s formula fills plain zeros; views of dims that are not split must take them.
TEST(Autograd, views_and_splits_of_whole_dims) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor full = integers({4, 6}, 1);
    const auto check = [&](const std::function<at::Tensor(const at::Tensor&)>& function) {
      same_gradient(mesh, full, {S(0)}, function);
    };
    check([](const at::Tensor& x) { return x.split(4, 1)[0] * 3; });
    check([](const at::Tensor& x) { return x.select(1, 2) * 3; });
    check([](const at::Tensor& x) { return x.slice(1, 1, 5, 2) * 3; });
    check([](const at::Tensor& x) { return x.view({4, 2, 3}).transpose(1, 2) * 3; });
    check([](const at::Tensor& x) { return x.reshape({24}) * 3; });
    check([](const at::Tensor& x) { return x.unbind(1)[1] * 3; });
    // In place on a view under autograd: LibTorch would use as_strided with global strides.
    check([](const at::Tensor& x) {
      const at::Tensor y = x * 2;
      y.select(1, 0).mul_(5);
      return y;
    });
    check([](const at::Tensor& x) {
      const at::Tensor y = x * 2;
      y.view({4, 2, 3}).transpose(1, 2).select(2, 0).add_(y.slice(1, 0, 3));
      return y * y;
    });
  });
}

TEST(Autograd, local_parts_and_redistribution_are_differentiable) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    const float rank = static_cast<float>(mesh->coordinate(0));
    // The parts of a sum each have the whole gradient.
    const at::Tensor part = at::full({4}, rank).requires_grad_();
    const at::Tensor weight = at::arange(4, at::kFloat);
    (full_tensor(from_local(part, mesh, {kP})) * weight).sum().backward();
    EXPECT_EQ(difference(part.grad(), weight), "");
    // A shard's gradient is its part of the whole gradient.
    const at::Tensor shard = at::full({2}, rank).requires_grad_();
    (full_tensor(from_local(shard, mesh, {S(0)})) * weight).sum().backward();
    EXPECT_EQ(difference(shard.grad(), weight.narrow(0, 2 * mesh->coordinate(0), 2)), "");
    // Through another placement and out again.
    const at::Tensor sharded = distribute_tensor(leaf(at::ones({4, 4})), mesh, {S(0)});
    (to_local(redistribute(sharded, {S(1)})) * (rank + 1)).sum().backward();
    const at::Tensor expected = at::ones({4, 4});
    expected.narrow(1, 2, 2).fill_(2);
    EXPECT_EQ(difference(full_tensor(sharded.grad()), expected), "");
  });
}

TEST(Autograd, double_backward_and_autograd_grad) {
  on_mesh({3}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor plain = leaf(integers({5}, 3));
    const at::Tensor sharded = distribute_tensor(plain, mesh, {S(0)});
    const auto second = [](const at::Tensor& x) {
      const at::Tensor first =
          torch::autograd::grad({(x * x * x).sum()}, {x}, {}, true, /*create_graph=*/true)[0];
      return torch::autograd::grad({(first * first).sum()}, {x})[0];
    };
    EXPECT_EQ(difference(full_tensor(second(sharded)), second(plain)), "");
  });
}

TEST(Autograd, hooks_accumulation_and_saved_version_errors) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor x = distribute_tensor(leaf(integers({4}, 1)), mesh, {S(0)});
    int calls = 0;
    x.register_hook([&](const at::Tensor& gradient) {
      ++calls;
      EXPECT_TRUE(is_dtensor(gradient));
      return gradient * 2;
    });
    (x * 3).sum().backward();
    (x * 3).sum().backward();
    EXPECT_EQ(calls, 2);
    EXPECT_EQ(difference(full_tensor(x.grad()), at::full({4}, 12.0F)), "");
    // A saved tensor that is written to before backward is an error, through the DTensor and, where
    // from_local made it, through its local part.
    const at::Tensor y = x * 1;
    const at::Tensor z = y * y;
    y.detach().add_(1);
    EXPECT_ANY_THROW(z.sum().backward());
    const at::Tensor local = at::ones({2});
    const at::Tensor shared = from_local(local, mesh, {S(0)});
    const at::Tensor w = x * shared;
    local.add_(1);
    EXPECT_ANY_THROW(w.sum().backward());
  });
}

// FSDP tells by the local part's version whether the optimizer has written to it.
TEST(Autograd, writes_through_the_dtensor_count_in_the_local_parts_version) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor x = from_local(at::ones({2}), mesh, {S(0)});
    auto version = [&] { return local_of(x)._version(); };
    auto before = version();
    x.mul_(2);
    EXPECT_GT(version(), before);
    before = version();
    x.data().mul_(2);
    EXPECT_GT(version(), before);
    before = version();
    at::_foreach_mul_({x}, 2);
    EXPECT_GT(version(), before);
    for (const at::Tensor& view : {x.detach(), x.unsqueeze(0), x.unsqueeze(1).transpose(0, 1)}) {
      before = version();
      view.mul_(2);
      EXPECT_GT(version(), before);
    }
    const auto shared = x._version();
    x.add_(1);
    EXPECT_EQ(x._version(), shared + 1);  // once, as on any tensor
  });
}

// A whole tensor times a partial sum is a partial sum, which the whole one cannot hold.
TEST(Autograd, in_place_ops_never_change_what_the_placements_mean) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor partial = from_local(at::ones({3}), mesh, {kP});  // 2 in all
    const at::Tensor whole = distribute_tensor(at::full({3}, 5.0F), mesh, {kR});
    whole.mul_(partial);
    EXPECT_EQ(spec_of(whole)->placements, Placements{kR});
    EXPECT_EQ(difference(full_tensor(whole), at::full({3}, 10.0F)), "");
    // Not linear: the partial is reduced, written, and is a partial again, in the same memory.
    const at::Tensor local = local_of(partial);
    partial.add_(1);
    EXPECT_EQ(spec_of(partial)->placements, Placements{kP});
    EXPECT_TRUE(local_of(partial).is_same(local));
    EXPECT_EQ(difference(full_tensor(partial), at::full({3}, 3.0F)), "");
    // A plain tensor cannot take a DTensor's value in place, nor a smaller one a larger's.
    EXPECT_ANY_THROW(at::ones({3}).mul_(whole));
    EXPECT_ANY_THROW(whole.mul_(distribute_tensor(at::ones({2, 3}), mesh, {S(0)})));
    // (4, 6) and (3, 6) can fit on a rank, but not as wholes.
    EXPECT_ANY_THROW(distribute_tensor(at::ones({4, 6}), mesh, {S(0)}) +
                     distribute_tensor(at::ones({3, 6}), mesh, {S(0)}));
    EXPECT_ANY_THROW(at::ones({4}).resize_({3}).copy_(whole));
  });
}

// A gradient assigned by hand may lie elsewhere, or be plain.
TEST(Autograd, align_gradient) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor x = distribute_tensor(integers({4}, 1), mesh, {S(0)}).requires_grad_();
    x.mutable_grad() = distribute_tensor(integers({4}, 2), mesh, {kR});
    align_gradient(x);
    EXPECT_EQ(spec_of(x.grad())->placements, Placements{S(0)});
    EXPECT_EQ(difference(full_tensor(x.grad()), integers({4}, 2)), "");
    x.mutable_grad() = integers({4}, 2);
    EXPECT_ANY_THROW(align_gradient(x));
  });
}

TEST(Autograd, detach_data_and_set_data_keep_the_local_part) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor x = distribute_tensor(leaf(integers({4}, 1)), mesh, {S(0)});
    EXPECT_TRUE(is_dtensor(x.data()));
    EXPECT_TRUE(local_of(x.data()).is_alias_of(local_of(x)));
    EXPECT_TRUE(local_of(x.detach()).is_alias_of(local_of(x)));
    EXPECT_FALSE(x.detach().requires_grad());
    const at::Tensor other = distribute_tensor(integers({6}, 2), mesh, {kR});
    x.set_data(other);
    EXPECT_EQ(x.size(0), 6);
    EXPECT_EQ(spec_of(x), spec_of(other));
    EXPECT_TRUE(local_of(x).is_alias_of(local_of(other)));
    EXPECT_ANY_THROW(x.set_data(at::ones({4})));
  });
}

// Column-wise then row-wise: the output is Partial until it is used whole.
TEST(Autograd, tensor_parallel_linears) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor x = integers({3, 4}, 1), a = integers({6, 4}, 2), b = integers({5, 6}, 3),
                     bias = integers({5}, 4);
    const at::Tensor pa = leaf(a), pb = leaf(b), pbias = leaf(bias);
    const at::Tensor plain = at::linear(at::relu(at::linear(x, pa)), pb, pbias);
    const at::Tensor da = distribute_tensor(leaf(a), mesh, {S(0)});
    const at::Tensor db = distribute_tensor(leaf(b), mesh, {S(1)});
    const at::Tensor dbias = distribute_tensor(leaf(bias), mesh, {kR});
    const at::Tensor dx = distribute_tensor(x, mesh, {kR});
    const at::Tensor output = at::linear(at::relu(at::linear(dx, da)), db, dbias);
    EXPECT_EQ(spec_of(output)->placements, Placements{kP});
    EXPECT_EQ(difference(full_tensor(output), plain), "");
    (plain * plain).sum().backward();
    (output * output).sum().backward();
    EXPECT_EQ(difference(full_tensor(da.grad()), pa.grad()), "");
    EXPECT_EQ(difference(full_tensor(db.grad()), pb.grad()), "");
    EXPECT_EQ(difference(full_tensor(dbias.grad()), pbias.grad()), "");
  });
}

}  // namespace
}  // namespace ppfsdp::dtensor
