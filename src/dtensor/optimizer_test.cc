// LibTorch's own optimizers and clipping, unmodified, on DTensors. Their steps are elementwise, so
// shards must be stepped to the same bits as the whole.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>

#include "src/comm/communicator.h"
#include "src/comm/reduction.h"
#include "src/dtensor/dtensor.h"
#include "src/dtensor/testing.h"

namespace ppfsdp::dtensor {
namespace {

using testing::difference;
using testing::kR;
using testing::normals;
using testing::on_mesh;
using testing::S;

using Tensors = std::vector<at::Tensor>;
using MakeOptimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(const Tensors& parameters)>;

/// Uneven on 3 ranks, with an empty shard, and a whole one.
const std::vector<std::vector<int64_t>> kSizes = {{7, 3}, {2, 5}, {6}, {4, 4}};

Tensors parameters(uint64_t seed) {
  Tensors made;
  for (const auto& sizes : kSizes) {
    made.push_back(normals(sizes, seed++));
  }
  return made;
}

Tensors distributed(const Tensors& tensors, const mesh::DeviceMeshPtr& mesh) {
  Tensors made;
  for (const at::Tensor& tensor : tensors) {
    const Placements placements = made.size() == 3 ? Placements{kR} : Placements{S(0)};
    made.push_back(distribute_tensor(tensor, mesh, placements));
  }
  return made;
}

void steps_alike(const mesh::DeviceMeshPtr& mesh, const MakeOptimizer& make) {
  Tensors plain = parameters(1);
  Tensors sharded = distributed(plain, mesh);
  for (Tensors* all : {&plain, &sharded}) {
    for (at::Tensor& tensor : *all) {
      tensor.requires_grad_();
    }
  }
  const auto plain_optimizer = make(plain);
  const auto sharded_optimizer = make(sharded);
  for (uint64_t step = 0; step < 3; ++step) {
    const Tensors gradients = parameters(100 * (step + 1));
    const Tensors sharded_gradients = distributed(gradients, mesh);
    for (size_t i = 0; i < plain.size(); ++i) {
      plain[i].mutable_grad() = gradients[i];
      sharded[i].mutable_grad() = sharded_gradients[i];
    }
    plain_optimizer->step();
    sharded_optimizer->step();
    for (size_t i = 0; i < plain.size(); ++i) {
      ASSERT_TRUE(is_dtensor(sharded[i]));
      ASSERT_EQ(difference(full_tensor(sharded[i]), plain[i]), "") << "step " << step << ", " << i;
    }
  }
}

TEST(Optimizer, libtorch_adamw_steps_shards_as_the_whole) {
  for (int64_t world : {1, 3}) {
    for (bool amsgrad : {false, true}) {
      on_mesh({world}, [&](const mesh::DeviceMeshPtr& mesh) {
        steps_alike(mesh, [&](const Tensors& tensors) {
          return std::make_unique<torch::optim::AdamW>(
              tensors, torch::optim::AdamWOptions(0.1).weight_decay(0.02).amsgrad(amsgrad));
        });
      });
    }
  }
}

TEST(Optimizer, libtorch_sgd_steps_shards_as_the_whole) {
  on_mesh({3}, [](const mesh::DeviceMeshPtr& mesh) {
    steps_alike(mesh, [](const Tensors& tensors) {
      return std::make_unique<torch::optim::SGD>(
          tensors, torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.01));
    });
  });
}

/// All of AdamW's foreach steps as Python's torch.optim runs them.
void foreach_adamw(Tensors& p, const Tensors& g, Tensors& m, Tensors& v) {
  at::_foreach_mul_(p, 0.999);
  at::_foreach_lerp_(m, g, 0.1);
  at::_foreach_mul_(v, 0.99);
  at::_foreach_addcmul_(v, g, g, 0.01);
  Tensors denominators = at::_foreach_sqrt(v);
  at::_foreach_div_(denominators, 0.5);
  at::_foreach_add_(denominators, 1e-8);
  at::_foreach_addcdiv_(p, m, denominators, -0.1);
}

// A list in which an element took its neighbour's placements would fail here: they differ.
TEST(Optimizer, foreach_steps_equal_plain_ones) {
  on_mesh({3}, [](const mesh::DeviceMeshPtr& mesh) {
    Tensors p = parameters(1), m = parameters(20), v = at::_foreach_mul(m, m);
    const Tensors g = parameters(40);
    Tensors dp = distributed(p, mesh), dm = distributed(m, mesh), dv = distributed(v, mesh);
    const Tensors dg = distributed(g, mesh);
    foreach_adamw(p, g, m, v);
    foreach_adamw(dp, dg, dm, dv);
    for (size_t i = 0; i < p.size(); ++i) {
      EXPECT_EQ(difference(full_tensor(dp[i]), p[i]), "") << i;
      EXPECT_EQ(difference(full_tensor(dm[i]), m[i]), "") << i;
      EXPECT_EQ(difference(full_tensor(dv[i]), v[i]), "") << i;
    }
  });
}

Tensors locals_of(const Tensors& dtensors) {
  Tensors locals;
  for (const at::Tensor& dtensor : dtensors) {
    locals.push_back(local_of(dtensor).clone());
  }
  return locals;
}

// The fused kernels round the last elements of a tensor, which do not fill a vector, in their own
// way, so the whole is not the reference; the same kernels on the same shards are.
TEST(Optimizer, fused_steps_equal_those_of_the_local_parts) {
  on_mesh({3}, [](const mesh::DeviceMeshPtr& mesh) {
    const Tensors dp = distributed(parameters(1), mesh), dm = distributed(parameters(20), mesh),
                  dg = distributed(parameters(40), mesh), dv = at::_foreach_mul(dm, dm);
    const Tensors p = locals_of(dp), m = locals_of(dm), g = locals_of(dg), v = locals_of(dv);
    const Tensors steps(p.size(), at::ones({}));
    at::_fused_adamw_(p, g, m, v, {}, steps, 0.1, 0.9, 0.99, 0.01, 1e-8, false, false);
    at::_fused_adamw_(dp, dg, dm, dv, {}, steps, 0.1, 0.9, 0.99, 0.01, 1e-8, false, false);
    at::_fused_sgd_(p, g, m, 0.01, 0.9, 0.1, 0.0, true, false, false);
    at::_fused_sgd_(dp, dg, dm, 0.01, 0.9, 0.1, 0.0, true, false, false);
    for (size_t i = 0; i < p.size(); ++i) {
      EXPECT_EQ(difference(local_of(dp[i]), p[i]), "") << i;
      EXPECT_EQ(difference(local_of(dm[i]), m[i]), "") << i;
      EXPECT_EQ(difference(local_of(dv[i]), v[i]), "") << i;
    }
  });
}

TEST(Optimizer, foreach_lists_may_mix_meshes_and_plain_tensors) {
  on_mesh({2, 2}, [](const mesh::DeviceMeshPtr& mesh) {
    const auto line = mesh::DeviceMesh::create(mesh->runtime(), {4});
    const Tensors plain = parameters(1);
    const Tensors mixed = {distribute_tensor(plain[0], mesh, {S(0), S(1)}),
                           distribute_tensor(plain[1], line, {S(1)}), plain[2].clone(),
                           distribute_tensor(plain[3], line, {S(0)})};
    const Tensors factors = {plain[0], plain[1], plain[2], plain[3]};
    const Tensors products = at::_foreach_mul(mixed, factors);
    EXPECT_FALSE(is_dtensor(products[2]));
    for (size_t i = 0; i < plain.size(); ++i) {
      EXPECT_EQ(difference(i == 2 ? products[i] : full_tensor(products[i]), plain[i] * plain[i]),
                "");
    }
  });
}

/// The total norm, folded as the mesh folds: each rank's norms of its shards, their p-th powers
/// summed in the mesh's order, the root, and the norm of those.
at::Tensor folded_norm(const Tensors& gradients, const mesh::DeviceMeshPtr& mesh, double p) {
  std::vector<at::Tensor> norms;
  for (size_t i = 0; i < gradients.size(); ++i) {
    norms.push_back(at::zeros({}));
  }
  std::vector<at::Tensor> powers;
  for (int64_t rank = 0; rank < mesh->size(); ++rank) {
    Tensors own;
    for (const at::Tensor& gradient : gradients) {
      const ShardRange range = shard_range(gradient.size(0), mesh->size(), rank);
      own.push_back(gradient.narrow(0, range.offset, range.length).norm(p));
    }
    powers.push_back(at::pow(at::stack(own), p));
  }
  if (mesh->size() == 1) {
    Tensors own;
    for (const at::Tensor& gradient : gradients) {
      own.push_back(gradient.norm(p));
    }
    return at::stack(own).norm(p);
  }
  at::Tensor sum = at::empty_like(powers.front());
  comm::reduce_range(mesh->runtime().reduction_order(), comm::ReduceOp::sum(), powers, 0,
                     sum.numel(), sum);
  return at::pow(sum, 1 / p).norm(p);
}

// FSDP's reported norm and the coefficient must be the mesh's own, to the bit, from one all-reduce.
TEST(ClipGradNorm, equals_the_reference_fold_with_one_all_reduce) {
  for (int64_t world : {1, 2, 3, 4}) {
    for (double p : {1.0, 2.0, 3.0}) {
      on_mesh({world}, [&](const mesh::DeviceMeshPtr& mesh) {
        const Tensors gradients = parameters(7);
        Tensors sharded;
        for (const at::Tensor& gradient : gradients) {
          at::Tensor parameter = at::zeros_like(distribute_tensor(gradient, mesh, {S(0)}));
          parameter.mutable_grad() = distribute_tensor(gradient, mesh, {S(0)});
          sharded.push_back(parameter);
        }
        const at::Tensor total = folded_norm(gradients, mesh, p);
        const uint64_t before = mesh->communicator(0).sequence();
        const double norm = torch::nn::utils::clip_grad_norm_(sharded, 0.5, p);
        EXPECT_EQ(mesh->communicator(0).sequence() - before, world == 1 ? 0 : 1);
        EXPECT_EQ(norm, total.item().toDouble()) << "world " << world << ", p " << p;
        const at::Tensor coefficient = at::clamp(0.5 / (total + 1e-6), std::nullopt, 1.0);
        for (size_t i = 0; i < sharded.size(); ++i) {
          EXPECT_EQ(difference(full_tensor(sharded[i].grad()), gradients[i] * coefficient), "");
        }
      });
    }
  }
}

TEST(ClipGradNorm, infinity_is_the_largest_element) {
  on_mesh({3}, [](const mesh::DeviceMeshPtr& mesh) {
    const Tensors gradients = parameters(7);
    Tensors sharded;
    double largest = 0;
    for (const at::Tensor& gradient : gradients) {
      at::Tensor parameter = at::zeros_like(distribute_tensor(gradient, mesh, {S(0)}));
      parameter.mutable_grad() = distribute_tensor(gradient, mesh, {S(0)});
      sharded.push_back(parameter);
      largest = std::max(largest, gradient.abs().max().item().toDouble());
    }
    const uint64_t before = mesh->communicator(0).sequence();
    EXPECT_EQ(torch::nn::utils::clip_grad_norm_(sharded, 0.5, INFINITY), largest);
    EXPECT_EQ(mesh->communicator(0).sequence() - before, 1);
    const Tensors foreach = at::_foreach_norm(Tensors{sharded[0].grad(), sharded[1].grad()},
                                              std::numeric_limits<double>::infinity());
    EXPECT_EQ(full_tensor(foreach[1]).item<float>(), sharded[1].grad().abs().max().item<float>());
  });
}

// Both meshes' names, or the user cannot tell which parameter is astray.
TEST(ClipGradNorm, gradients_on_two_meshes_are_an_error_that_names_both) {
  on_mesh({2, 2}, [](const mesh::DeviceMeshPtr& mesh) {
    const auto line = mesh::DeviceMesh::create(mesh->runtime(), {4});
    try {
      at::stack({distribute_tensor(at::ones({4}), mesh, {S(0), kR}).norm(),
                 distribute_tensor(at::ones({4}), line, {S(0)}).norm()});
      ADD_FAILURE() << "no error";
    } catch (const std::exception& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("DeviceMesh(2, 2)"), std::string::npos) << text;
      EXPECT_NE(text.find("DeviceMesh(4)"), std::string::npos) << text;
    }
  });
}

}  // namespace
}  // namespace ppfsdp::dtensor
