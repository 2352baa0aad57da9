// The fallback: what it returns, where it keeps its plans, and what it says when it has none.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "src/comm/single_runtime.h"
#include "src/dtensor/dtensor.h"
#include "src/dtensor/testing.h"

namespace ppfsdp::dtensor {
namespace {

using testing::difference;
using testing::integers;
using testing::on_mesh;
using testing::S;

at::Tensor sharded_leaf(const mesh::DeviceMeshPtr& mesh) {
  return distribute_tensor(integers({5, 3}, 1), mesh, {S(0)}).requires_grad_();
}

template <typename Function>
std::string error_of(const Function& function) {
  try {
    function();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

// The error has to say which op and which placements, or nobody can act on it.
TEST(Dispatch, an_op_without_a_rule_names_itself_and_the_placements) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor dtensor = distribute_tensor(integers({4, 4}, 1), mesh, {S(0)});
    const std::string error = error_of([&] { at::linalg_qr(dtensor); });
    EXPECT_NE(error.find("linalg_qr"), std::string::npos) << error;
    EXPECT_NE(error.find("Shard(0)"), std::string::npos) << error;
  });
}

TEST(Dispatch, in_place_ops_return_the_tensor_itself) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor x = sharded_leaf(mesh).detach();
    EXPECT_TRUE(x.mul_(2).is_same(x));
    EXPECT_TRUE(x.copy_(integers({5, 3}, 1)).is_same(x));
    const auto [values, indices] = x.max(1);
    EXPECT_EQ(difference(full_tensor(values), std::get<0>(integers({5, 3}, 1).max(1))), "");
    EXPECT_EQ(difference(full_tensor(indices), std::get<1>(integers({5, 3}, 1).max(1))), "");
  });
}

// Caches are the thread's own; the engine of a GPU runs backward on other threads than forward.
TEST(Dispatch, ops_and_backward_on_several_threads_at_once) {
  const auto runtime = comm::make_single_runtime();
  const auto mesh = mesh::DeviceMesh::create(*runtime, {1});
  std::vector<std::thread> threads;
  std::vector<at::Tensor> gradients(4);
  for (at::Tensor& gradient : gradients) {
    threads.emplace_back([&gradient, &mesh] {
      for (int i = 0; i < 50; ++i) {
        const at::Tensor x = sharded_leaf(mesh);
        ((x * x).sum(0) * 3).sum().backward();
        gradient = x.grad();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const at::Tensor& gradient : gradients) {
    EXPECT_EQ(difference(full_tensor(gradient), integers({5, 3}, 1) * 6), "");
  }
}

// Inference tensors have no autograd key, at which LibTorch takes ops like linear apart; and views
// of normal tensors, a module's parameters say, stay normal.
TEST(Dispatch, inference_mode) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor full = integers({5, 3}, 1);
    const at::Tensor weight = sharded_leaf(mesh);
    const c10::InferenceMode inference;
    const at::Tensor x = distribute_tensor(full, mesh, {S(0)});
    EXPECT_TRUE(x.is_inference());
    EXPECT_EQ(difference(full_tensor(at::linear(x, weight)), full.mm(full.t())), "");
    EXPECT_EQ(difference(full_tensor(x.matmul(weight.t()).to(at::kDouble)),
                         full.mm(full.t()).to(at::kDouble)),
              "");
    EXPECT_EQ(x.sum().item<float>(), full.sum().item<float>());
    x.mul_(2);
    x.detach().add_(1);
    EXPECT_EQ(difference(full_tensor(x), full * 2 + 1), "");
    EXPECT_FALSE(weight.t().is_inference());
    EXPECT_FALSE(weight.unsqueeze(0).view({5, 3}).is_inference());
    weight.detach().mul_(2);
    EXPECT_EQ(difference(full_tensor(weight.reshape({5, 3})), full * 2), "");
  });
}

// A mesh that a cache kept alive would hold its communicators past the end of their runtime.
TEST(Dispatch, caches_do_not_keep_a_mesh_alive) {
  const auto runtime = comm::make_single_runtime();
  std::weak_ptr<const mesh::DeviceMesh> watched;
  {
    const auto mesh = mesh::DeviceMesh::create(*runtime, {1});
    watched = mesh;
    const at::Tensor x = sharded_leaf(mesh);
    (x * x + 1).sum().backward();
  }
  EXPECT_TRUE(watched.expired());
}

}  // namespace
}  // namespace ppfsdp::dtensor
