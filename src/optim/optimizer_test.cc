// AdamW and SGD against their formulas in double, one implementation against the other, and on
// sharded parameters against whole ones. Bits against Python's: //golden:optimizer_test.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <functional>
#include <memory>

#include "sim/mesh/world.h"
#include "src/dtensor/dtensor.h"
#include "src/mesh/device_mesh.h"
#include "src/optim/adamw.h"
#include "src/optim/sgd.h"

namespace ppfsdp::optim {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Make = std::function<std::unique_ptr<Optimizer>(std::vector<at::Tensor>)>;

constexpr Implementation kAll[] = {Implementation::kSingleTensor, Implementation::kForeach,
                                   Implementation::kFused};

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

/// Leaves of odd sizes; one of them empty of rows on the last of four ranks, one of a single
/// element.
std::vector<at::Tensor> make_parameters(at::ScalarType dtype = at::kFloat) {
  at::manual_seed(1);
  std::vector<at::Tensor> result;
  for (const std::vector<int64_t>& sizes :
       std::vector<std::vector<int64_t>>{{5, 7}, {9}, {1, 3, 2}}) {
    result.push_back(at::randn(sizes).to(dtype).requires_grad_());
  }
  return result;
}

at::Tensor make_grad(const at::Tensor& like, int step) {
  at::manual_seed(100 + step);
  return at::randn(like.sizes()).to(like.scalar_type());
}

/// Whole values after `steps` steps.
std::vector<at::Tensor> run_plain(const Make& make, int steps, at::ScalarType dtype = at::kFloat) {
  std::vector<at::Tensor> parameters = make_parameters(dtype);
  const auto optimizer = make(parameters);
  for (int step = 0; step < steps; ++step) {
    optimizer->set_lr(0.1 / (1 + step));
    for (at::Tensor& parameter : parameters) parameter.mutable_grad() = make_grad(parameter, step);
    optimizer->step();
  }
  return parameters;
}

Make adamw(Implementation implementation) {
  return [=](std::vector<at::Tensor> parameters) {
    return std::make_unique<AdamW>(
        std::move(parameters), AdamWOptions{.weight_decay = 0.1, .implementation = implementation});
  };
}

Make sgd(const SGDOptions& options) {
  return [=](std::vector<at::Tensor> parameters) {
    return std::make_unique<SGD>(std::move(parameters), options);
  };
}

std::vector<SGDOptions> sgd_variants() {
  std::vector<SGDOptions> result;
  for (const Implementation implementation : kAll) {
    result.push_back({.implementation = implementation});
    result.push_back({.weight_decay = 0.1, .implementation = implementation});
    result.push_back({.momentum = 0.9, .implementation = implementation});
    result.push_back(
        {.momentum = 0.9, .dampening = 0.3, .weight_decay = 0.1, .implementation = implementation});
    result.push_back(
        {.momentum = 0.9, .weight_decay = 0.1, .nesterov = true, .implementation = implementation});
  }
  return result;
}

TEST(AdamW, FollowsItsFormula) {
  for (const Implementation implementation : kAll) {
    const std::vector<at::Tensor> ours = run_plain(adamw(implementation), 4, at::kDouble);
    const std::vector<at::Tensor> start = make_parameters(at::kDouble);
    for (size_t i = 0; i < ours.size(); ++i) {
      at::Tensor p = start[i].detach().clone(), m = at::zeros_like(p), v = at::zeros_like(p);
      for (int step = 0; step < 4; ++step) {
        const double lr = 0.1 / (1 + step), t = step + 1;
        const at::Tensor g = make_grad(p, step);
        p = p * (1 - lr * 0.1);
        m = 0.9 * m + 0.1 * g;
        v = 0.999 * v + 0.001 * g * g;
        p = p - lr / (1 - std::pow(0.9, t)) * m / ((v / (1 - std::pow(0.999, t))).sqrt() + 1e-8);
      }
      // Some ten roundings of double a step on values of order 1, over 4 steps.
      EXPECT_TRUE(at::allclose(ours[i], p, 1e-14, 1e-14));
    }
  }
}

TEST(SGD, FollowsItsFormula) {
  for (const SGDOptions& options : sgd_variants()) {
    const std::vector<at::Tensor> ours = run_plain(sgd(options), 4, at::kDouble);
    const std::vector<at::Tensor> start = make_parameters(at::kDouble);
    for (size_t i = 0; i < ours.size(); ++i) {
      at::Tensor p = start[i].detach().clone(), b;
      for (int step = 0; step < 4; ++step) {
        const at::Tensor g = make_grad(p, step) + options.weight_decay * p;
        b = b.defined() ? options.momentum * b + (1 - options.dampening) * g : g;
        const at::Tensor move = options.momentum == 0 ? g
                                : options.nesterov    ? g + options.momentum * b
                                                      : b;
        p = p - 0.1 / (1 + step) * move;
      }
      EXPECT_TRUE(at::allclose(ours[i], p, 1e-14, 1e-14));
    }
  }
}

TEST(Implementations, SingleTensorAndForeachAgreeToTheBitOnTheCpu) {
  std::vector<std::pair<Make, Make>> pairs = {
      {adamw(Implementation::kSingleTensor), adamw(Implementation::kForeach)}};
  for (SGDOptions options : sgd_variants()) {
    if (options.implementation != Implementation::kSingleTensor) continue;
    const Make single = sgd(options);
    options.implementation = Implementation::kForeach;
    pairs.emplace_back(single, sgd(options));
  }
  for (const auto& [single, foreach] : pairs) {
    const std::vector<at::Tensor> a = run_plain(single, 5), b = run_plain(foreach, 5);
    for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i]));
  }
}

TEST(Optimizer, ShardedStepsEqualWholeOnes) {
  // A step that used another rank's part, or a state laid out otherwise, would differ.
  struct Variant {
    Make make;
    bool exact;
  };
  std::vector<Variant> all;
  for (const Implementation implementation : kAll) {
    // The fused kernels of the CPU round the last elements of a tensor, those that fill no vector
    // register, otherwise than the rest, and a shard ends elsewhere than the whole.
    all.push_back({adamw(implementation), implementation != Implementation::kFused});
  }
  for (const SGDOptions& options : sgd_variants()) {
    all.push_back({sgd(options), options.implementation != Implementation::kFused});
  }
  for (size_t variant = 0; variant < all.size(); ++variant) {
    const auto& [make, exact] = all[variant];
    const std::vector<at::Tensor> whole = run_plain(make, 3);
    sim::run_world(4, {}, [&, &make = make, exact = exact](comm::Runtime& runtime) {
      const auto mesh = mesh::DeviceMesh::create(runtime, {4});
      const dtensor::Placements shard = {dtensor::Placement::shard(0)};
      std::vector<at::Tensor> sharded;
      for (const at::Tensor& parameter : make_parameters()) {
        sharded.push_back(
            dtensor::distribute_tensor(parameter.detach(), mesh, shard).requires_grad_());
      }
      const auto optimizer = make(sharded);
      for (int step = 0; step < 3; ++step) {
        optimizer->set_lr(0.1 / (1 + step));
        for (at::Tensor& parameter : sharded) {
          parameter.mutable_grad() =
              dtensor::distribute_tensor(make_grad(parameter, step), mesh, shard);
        }
        optimizer->step();
      }
      for (size_t i = 0; i < sharded.size(); ++i) {
        const at::Tensor gathered = dtensor::full_tensor(sharded[i].detach());
        if (exact) {
          EXPECT_TRUE(at::equal(gathered, whole[i].detach()))
              << "variant " << variant << ", parameter " << i << ": "
              << (gathered - whole[i].detach());
        } else {
          // Some ten roundings a step of values of order 1.
          EXPECT_TRUE(at::allclose(gathered, whole[i].detach(), 1e-5, 1e-6));
        }
        for (const std::string& name : optimizer->state_names()) {
          EXPECT_EQ(dtensor::spec_of(optimizer->state(i, name))->placements, shard) << name;
        }
      }
    });
  }
}

TEST(Optimizer, GradientInOtherPlacementsIsRedistributed) {
  sim::run_world(2, {}, [&](comm::Runtime& runtime) {
    const auto mesh = mesh::DeviceMesh::create(runtime, {2});
    const at::Tensor parameter =
        dtensor::distribute_tensor(at::zeros({3}), mesh, {dtensor::Placement::shard(0)})
            .requires_grad_();
    SGD optimizer({parameter}, {.lr = 1});
    // Each rank's part of the sum.
    parameter.mutable_grad() = dtensor::from_local(at::full({3}, 1.0 + runtime.rank()), mesh,
                                                   {dtensor::Placement::partial()});
    optimizer.step();
    EXPECT_TRUE(at::equal(dtensor::full_tensor(parameter.detach()), at::full({3}, -3.0)));
    optimizer.zero_grad(/*set_to_none=*/false);
    EXPECT_TRUE(at::equal(dtensor::full_tensor(parameter.grad()), at::zeros({3})));
    parameter.mutable_grad() = at::zeros({3});
    EXPECT_THAT(error_of([&] { optimizer.step(); }),
                HasSubstr("parameter 0 is a DTensor and its gradient a plain tensor"));
  });
}

TEST(Optimizer, LibTorchsOwnStepShardedParametersToo) {
  sim::run_world(2, {}, [&](comm::Runtime& runtime) {
    const auto mesh = mesh::DeviceMesh::create(runtime, {2});
    const dtensor::Placements shard = {dtensor::Placement::shard(0)};
    const auto run = [&](bool sharded, bool adam) {
      std::vector<at::Tensor> parameters;
      for (const at::Tensor& parameter : make_parameters()) {
        parameters.push_back(
            sharded ? dtensor::distribute_tensor(parameter.detach(), mesh, shard).requires_grad_()
                    : parameter);
      }
      std::unique_ptr<torch::optim::Optimizer> optimizer;
      if (adam) {
        optimizer = std::make_unique<torch::optim::AdamW>(parameters);
      } else {
        optimizer = std::make_unique<torch::optim::SGD>(
            parameters, torch::optim::SGDOptions(0.1).momentum(0.9));
      }
      for (int step = 0; step < 3; ++step) {
        for (at::Tensor& parameter : parameters) {
          const at::Tensor grad = make_grad(parameter, step);
          parameter.mutable_grad() = sharded ? dtensor::distribute_tensor(grad, mesh, shard) : grad;
        }
        optimizer->step();
      }
      for (at::Tensor& parameter : parameters) {
        parameter = sharded ? dtensor::full_tensor(parameter.detach()) : parameter.detach();
      }
      return parameters;
    };
    for (const bool adam : {false, true}) {
      const std::vector<at::Tensor> whole = run(false, adam), sharded = run(true, adam);
      for (size_t i = 0; i < whole.size(); ++i) EXPECT_TRUE(at::equal(whole[i], sharded[i]));
    }
  });
}

TEST(Optimizer, ParametersWithoutGradientStayAndCountNoStep) {
  std::vector<at::Tensor> parameters = make_parameters();
  AdamW optimizer(parameters);
  const at::Tensor before = parameters[1].detach().clone();
  for (const size_t i : {0, 2}) parameters[i].mutable_grad() = make_grad(parameters[i], 0);
  optimizer.step();
  EXPECT_TRUE(at::equal(parameters[1].detach(), before));
  EXPECT_FALSE(optimizer.state(1, "exp_avg").defined());
  EXPECT_EQ(optimizer.step_count(1), 0);
  EXPECT_EQ(optimizer.step_count(2), 1);
}

TEST(Optimizer, LateParametersStartTheirOwnCount) {
  // A bias correction by a common step count, or a first momentum taken as a later one, would show.
  for (const Make& make :
       {adamw(Implementation::kForeach), adamw(Implementation::kFused),
        sgd({.momentum = 0.9, .dampening = 0.5, .implementation = Implementation::kForeach}),
        sgd({.momentum = 0.9, .dampening = 0.5, .implementation = Implementation::kFused})}) {
    std::vector<at::Tensor> together = make_parameters(), alone = make_parameters();
    const auto optimizer = make(together);
    together[0].mutable_grad() = make_grad(together[0], 0);
    optimizer->step();
    together[1].mutable_grad() = make_grad(together[1], 1);
    optimizer->step();
    const auto other = make({alone[1]});
    alone[1].mutable_grad() = make_grad(alone[1], 1);
    other->step();
    EXPECT_TRUE(at::equal(together[1], alone[1]));
  }
}

TEST(Optimizer, MixedDtypesStepLikeEachAlone) {
  for (const Implementation implementation : kAll) {
    std::vector<at::Tensor> mixed = {at::full({3}, 1.0).requires_grad_(),
                                     at::full({3}, 1.0, at::kBFloat16).requires_grad_()};
    const auto optimizer = adamw(implementation)(mixed);
    for (at::Tensor& parameter : mixed) parameter.mutable_grad() = make_grad(parameter, 0);
    optimizer->step();
    at::Tensor alone = at::full({3}, 1.0, at::kBFloat16).requires_grad_();
    alone.mutable_grad() = make_grad(alone, 0);
    adamw(implementation)({alone})->step();
    EXPECT_TRUE(at::equal(mixed[1], alone));
  }
}

TEST(Optimizer, ZeroGradForgetsOrZeroes) {
  std::vector<at::Tensor> parameters = make_parameters();
  SGD optimizer(parameters);
  parameters[0].mutable_grad() = make_grad(parameters[0], 0);
  optimizer.zero_grad(/*set_to_none=*/false);
  EXPECT_TRUE(at::equal(parameters[0].grad(), at::zeros({5, 7})));
  optimizer.zero_grad();
  EXPECT_FALSE(parameters[0].grad().defined());
}

TEST(Optimizer, AStepBetweenForwardAndBackwardIsNoticed) {
  // The kernels run below autograd's layer, which otherwise counts writes.
  at::Tensor parameter = at::full({2}, 1.0).requires_grad_();
  const at::Tensor loss = (parameter * parameter).sum();
  SGD optimizer({parameter});
  parameter.mutable_grad() = at::full({2}, 1.0);
  optimizer.step();
  EXPECT_THAT(error_of([&] { loss.backward(); }), HasSubstr("modified by an inplace operation"));
}

TEST(Optimizer, GradientsAreLeftAsTheyAre) {
  for (const SGDOptions& options : sgd_variants()) {
    at::Tensor parameter = at::full({2}, 1.0).requires_grad_();
    const auto optimizer = sgd(options)({parameter});
    for (int step = 0; step < 2; ++step) {
      parameter.mutable_grad() = at::full({2}, 3.0);
      optimizer->step();
      EXPECT_TRUE(at::equal(parameter.grad(), at::full({2}, 3.0)));
    }
  }
}

TEST(Optimizer, StateCanBeCarriedOver) {
  // What a checkpoint does: state and counts into a fresh optimizer, and on as if nothing had
  // happened.
  std::vector<at::Tensor> a = make_parameters(), b = make_parameters();
  AdamW first(a);
  const auto give = [](std::vector<at::Tensor>& parameters, int step) {
    for (at::Tensor& parameter : parameters) parameter.mutable_grad() = make_grad(parameter, step);
  };
  give(a, 0);
  first.step();
  AdamW second(b);
  EXPECT_THAT(first.state_names(), ElementsAre("exp_avg", "exp_avg_sq"));
  for (size_t i = 0; i < a.size(); ++i) {
    at::NoGradGuard no_grad;
    b[i].copy_(a[i]);
    for (const std::string& name : first.state_names()) {
      second.state(i, name) = first.state(i, name).clone();
    }
    second.set_step_count(i, first.step_count(i));
  }
  give(a, 1), give(b, 1);
  first.step(), second.step();
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i]));
  EXPECT_THAT(error_of([&] { first.state(0, "momentum_buffer"); }),
              HasSubstr("AdamW keeps no state called 'momentum_buffer'"));
}

// A step that fails half way would leave some parameters one step ahead of the others.
TEST(OptimizerErrors, AFailedStepChangesNothing) {
  std::vector<at::Tensor> parameters = make_parameters();
  AdamW optimizer(parameters);
  const at::Tensor before = parameters[0].detach().clone();
  for (at::Tensor& parameter : parameters) parameter.mutable_grad() = make_grad(parameter, 0);
  parameters[2].mutable_grad() = at::zeros({7});
  EXPECT_THAT(error_of([&] { optimizer.step(); }),
              HasSubstr("AdamW: the gradient [7] of parameter 2 does not have its size [1, 3, 2]"));
  EXPECT_TRUE(at::equal(parameters[0].detach(), before));
  EXPECT_EQ(optimizer.step_count(0), 0);
  EXPECT_FALSE(optimizer.state(0, "exp_avg").defined());
  parameters[2].mutable_grad() = at::zeros({1, 3, 2}).to_sparse();
  EXPECT_THAT(error_of([&] { optimizer.step(); }), HasSubstr("parameter 2 must be dense"));
  EXPECT_EQ(optimizer.step_count(0), 0);
}

// A state of one element would broadcast, and one state without the other be zeros or a crash.
TEST(OptimizerErrors, StatesThatDoNotFitTheirParameter) {
  at::Tensor parameter = at::full({4}, 1.0).requires_grad_();
  parameter.mutable_grad() = at::full({4}, 1.0);
  AdamW optimizer({parameter});
  optimizer.state(0, "exp_avg") = at::zeros({4});
  EXPECT_THAT(error_of([&] { optimizer.step(); }),
              HasSubstr("parameter 0 has its state 'exp_avg' and lacks 'exp_avg_sq'"));
  optimizer.state(0, "exp_avg_sq") = at::zeros({1});
  EXPECT_THAT(error_of([&] { optimizer.step(); }),
              HasSubstr("state 'exp_avg_sq' of parameter 0 must be laid out as the parameter"));
  sim::run_world(2, {}, [&](comm::Runtime& runtime) {
    const auto mesh = mesh::DeviceMesh::create(runtime, {2});
    const at::Tensor sharded =
        dtensor::distribute_tensor(at::zeros({4}), mesh, {dtensor::Placement::shard(0)})
            .requires_grad_();
    sharded.mutable_grad() =
        dtensor::distribute_tensor(at::zeros({4}), mesh, {dtensor::Placement::shard(0)});
    SGD sgd({sharded}, {.momentum = 0.9});
    sgd.state(0, "momentum_buffer") =
        dtensor::distribute_tensor(at::zeros({4}), mesh, {dtensor::Placement::replicate()});
    EXPECT_THAT(error_of([&] { sgd.step(); }), HasSubstr("got [4], Float, DeviceMesh(2), [Repl"));
    sgd.state(0, "momentum_buffer") = at::zeros({2});
    EXPECT_THAT(error_of([&] { sgd.step(); }), HasSubstr("got a plain tensor of sizes [2]"));
  });
}

// FSDP tells by the local part's version that what it gathered is out of date.
TEST(Optimizer, AStepCountsInTheVersionOfTheLocalPart) {
  sim::run_world(2, {}, [&](comm::Runtime& runtime) {
    const auto mesh = mesh::DeviceMesh::create(runtime, {2});
    const at::Tensor parameter =
        dtensor::distribute_tensor(at::zeros({4}), mesh, {dtensor::Placement::shard(0)})
            .requires_grad_();
    parameter.mutable_grad() =
        dtensor::distribute_tensor(at::zeros({4}), mesh, {dtensor::Placement::shard(0)});
    const auto before = dtensor::local_of(parameter)._version();
    const auto own = parameter._version();
    SGD({parameter}).step();
    EXPECT_GT(dtensor::local_of(parameter)._version(), before);
    EXPECT_EQ(parameter._version(), own + 1);
  });
}

TEST(OptimizerErrors, NameTheOption) {
  const std::vector<at::Tensor> one = {at::zeros({1}).requires_grad_()};
  EXPECT_THAT(error_of([&] { AdamW({}); }), HasSubstr("AdamW: the list of parameters is empty"));
  EXPECT_THAT(error_of([&] { AdamW({one[0], one[0]}); }), HasSubstr("parameter 1 is in the list"));
  EXPECT_THAT(error_of([&] { AdamW({one[0] * 2}); }), HasSubstr("parameter 0 must be a leaf"));
  EXPECT_THAT(error_of([&] { AdamW({at::zeros({1}, at::kLong)}); }), HasSubstr("floating point"));
  EXPECT_THAT(error_of([&] { AdamW(one, {.lr = -1}); }), HasSubstr("AdamW: lr is -1, must be"));
  EXPECT_THAT(error_of([&] { AdamW(one, {.beta1 = 1}); }), HasSubstr("beta1 is 1, must be in"));
  EXPECT_THAT(error_of([&] { AdamW(one, {.beta2 = -0.1}); }), HasSubstr("beta2 is -0.1"));
  EXPECT_THAT(error_of([&] { AdamW(one, {.eps = -1}); }), HasSubstr("eps is -1"));
  EXPECT_THAT(error_of([&] { AdamW(one, {.weight_decay = -1}); }), HasSubstr("weight_decay is -1"));
  EXPECT_THAT(error_of([&] { SGD(one, {.momentum = -1}); }), HasSubstr("momentum is -1"));
  EXPECT_THAT(error_of([&] { SGD(one, {.nesterov = true}); }), HasSubstr("positive with nesterov"));
  EXPECT_THAT(error_of([&] { SGD(one, {.momentum = 1, .dampening = 1, .nesterov = true}); }),
              HasSubstr("dampening is 1, must be 0 with nesterov"));
  SGD sgd(one);
  EXPECT_THAT(error_of([&] { sgd.set_lr(NAN); }), HasSubstr("SGD: lr is nan"));
  EXPECT_EQ(sgd.lr(), 1e-3);
}

}  // namespace
}  // namespace ppfsdp::optim
