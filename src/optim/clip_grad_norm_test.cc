#include "src/optim/clip_grad_norm.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>

#include <functional>
#include <limits>
#include <string>

#include "sim/mesh/world.h"
#include "src/dtensor/dtensor.h"
#include "src/mesh/device_mesh.h"

namespace ppfsdp::optim {
namespace {

using ::testing::HasSubstr;

constexpr double kInf = std::numeric_limits<double>::infinity();

/// Leaves with gradients, of sizes that leave short and empty shards on four ranks; one without.
std::vector<at::Tensor> make_parameters() {
  at::manual_seed(2);
  std::vector<at::Tensor> result;
  for (const std::vector<int64_t>& sizes :
       std::vector<std::vector<int64_t>>{{5, 7}, {9}, {1, 3}, {2}}) {
    result.push_back(at::zeros(sizes).requires_grad_());
    if (sizes[0] != 2) result.back().mutable_grad() = at::randn(sizes);
  }
  return result;
}

at::Tensor all_grads(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> flat;
  for (const at::Tensor& parameter : parameters) {
    if (parameter.grad().defined()) flat.push_back(parameter.grad().flatten());
  }
  return at::cat(flat);
}

TEST(ClipGradNorm, ScalesToTheNormAskedForAndReturnsTheOneBefore) {
  for (const double p : {1.0, 2.0, 3.0, kInf}) {
    for (const bool foreach : {false, true}) {
      std::vector<at::Tensor> parameters = make_parameters();
      const auto before = at::linalg_vector_norm(all_grads(parameters), p).item<double>();
      const auto norm = clip_grad_norm_(parameters, 0.5, p, false, foreach).item<double>();
      // 47 values: a norm of norms adds them in another order, which costs some ulps of 6e-8.
      EXPECT_NEAR(norm / before, 1, 1e-6);
      EXPECT_NEAR(at::linalg_vector_norm(all_grads(parameters), p).item<double>(), 0.5, 1e-5);
    }
  }
}

TEST(ClipGradNorm, LeavesSmallGradientsAlone) {
  std::vector<at::Tensor> parameters = make_parameters();
  const at::Tensor before = all_grads(parameters);
  clip_grad_norm_(parameters, 1000);
  EXPECT_TRUE(at::equal(all_grads(parameters), before));
}

TEST(ClipGradNorm, IsLibTorchsToTheBitWherePowersOfTwoHideItsRounding) {
  for (const double p : {1.0, 2.0, 3.0, kInf}) {
    std::vector<at::Tensor> ours = make_parameters(), theirs = make_parameters();
    const auto norm = clip_grad_norm_(ours, 0.5, p).item<double>();
    EXPECT_EQ(norm, torch::nn::utils::clip_grad_norm_(theirs, 0.5, p));
    EXPECT_TRUE(at::equal(all_grads(ours), all_grads(theirs)));
  }
}

TEST(ClipGradNorm, ShardedGradientsGiveTheNormOfTheWholeOnEveryRank) {
  for (const double p : {1.0, 2.0, 3.0, kInf}) {
    for (const bool foreach : {false, true}) {
      std::vector<at::Tensor> whole = make_parameters();
      const auto expected = clip_grad_norm_(whole, 0.5, p).item<double>();
      std::vector<double> norms(4);
      sim::run_world(4, {}, [&](comm::Runtime& runtime) {
        const auto mesh = mesh::DeviceMesh::create(runtime, {4});
        const dtensor::Placements shard = {dtensor::Placement::shard(0)};
        std::vector<at::Tensor> sharded;
        for (const at::Tensor& parameter : make_parameters()) {
          sharded.push_back(
              dtensor::distribute_tensor(parameter.detach(), mesh, shard).requires_grad_());
          if (!parameter.grad().defined()) continue;
          sharded.back().mutable_grad() = dtensor::distribute_tensor(parameter.grad(), mesh, shard);
        }
        const uint64_t issued = mesh->communicator(0).sequence();
        const at::Tensor norm = clip_grad_norm_(sharded, 0.5, p, false, foreach);
        // The norms of all gradients travel together.
        EXPECT_EQ(mesh->communicator(0).sequence() - issued, 1u);
        EXPECT_FALSE(dtensor::is_dtensor(norm));
        norms[runtime.rank()] = norm.item<double>();
        EXPECT_NEAR(norms[runtime.rank()] / expected, 1, 1e-6);
        for (size_t i = 0; i < 3; ++i) {
          const at::Tensor difference = dtensor::full_tensor(sharded[i].grad()) - whole[i].grad();
          EXPECT_LT(difference.abs().max().item<double>(), 1e-6);
        }
      });
      EXPECT_EQ(norms, std::vector<double>(4, norms[0]));
    }
  }
}

TEST(ClipGradNorm, LibTorchsOwnClipsShardedGradientsToo) {
  for (const double p : {1.0, 2.0, kInf}) {
    sim::run_world(2, {}, [&](comm::Runtime& runtime) {
      const auto mesh = mesh::DeviceMesh::create(runtime, {2});
      const dtensor::Placements shard = {dtensor::Placement::shard(0)};
      std::vector<at::Tensor> ours, theirs;
      for (std::vector<at::Tensor>* list : {&ours, &theirs}) {
        at::manual_seed(2);
        for (const int64_t rows : {5, 4}) {
          const at::Tensor grad = at::randn({rows, 3});
          list->push_back(
              dtensor::distribute_tensor(at::zeros({rows, 3}), mesh, shard).requires_grad_());
          list->back().mutable_grad() = dtensor::distribute_tensor(grad, mesh, shard);
        }
      }
      const auto norm = clip_grad_norm_(ours, 0.5, p).item<double>();
      EXPECT_EQ(norm, torch::nn::utils::clip_grad_norm_(theirs, 0.5, p));
      for (size_t i = 0; i < ours.size(); ++i) {
        EXPECT_TRUE(
            at::equal(dtensor::local_of(ours[i].grad()), dtensor::local_of(theirs[i].grad())));
      }
    });
  }
}

TEST(ClipGradNorm, NonFiniteNormsAreAnErrorOnlyOnRequest) {
  std::vector<at::Tensor> parameters = make_parameters();
  parameters[0].mutable_grad().fill_(kInf);
  const at::Tensor before = all_grads(parameters);
  try {
    clip_grad_norm_(parameters, 1, 2, /*error_if_nonfinite=*/true);
    FAIL();
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what_without_backtrace(), HasSubstr("is inf; it can't be clipped"));
  }
  EXPECT_TRUE(at::equal(all_grads(parameters), before));
  EXPECT_EQ(clip_grad_norm_(parameters, 1).item<double>(), kInf);
}

TEST(ClipGradNorm, NoGradientsAndBadOrders) {
  const std::vector<at::Tensor> none = {at::zeros({1}).requires_grad_()};
  EXPECT_EQ(clip_grad_norm_(none, 1).item<double>(), 0);
  EXPECT_THROW(clip_grad_norm_(make_parameters(), 1, 0), c10::Error);
}

}  // namespace
}  // namespace ppfsdp::optim
