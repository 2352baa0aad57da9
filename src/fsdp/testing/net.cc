#include "src/fsdp/testing/net.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include "src/dtensor/dtensor.h"
#include "src/mesh/device_mesh.h"

namespace ppfsdp::fsdp::testing {
namespace {

constexpr double kLossFactor = 840;  // the least common multiple of 1 to 8

Net make_net(const std::vector<int64_t>& hidden) {
  Net net(hidden);
  auto generator = at::detail::createCPUGenerator(3);
  const c10::NoGradGuard no_grad;
  for (at::Tensor& param : net->parameters()) {
    param.copy_(at::randint(-1, 2, param.sizes(), generator, at::kDouble));
  }
  return net;
}

at::Tensor whole(const at::Tensor& tensor) {
  return dtensor::is_dtensor(tensor) ? dtensor::full_tensor(tensor).clone() : tensor.clone();
}

struct Result {
  std::vector<at::Tensor> seen;
  std::vector<at::Tensor> params;
  std::vector<at::Tensor> grads;
};

Result result_of(const Trial& trial) {
  const c10::NoGradGuard no_grad;
  Result result{.seen = trial.seen, .params = {}, .grads = {}};
  for (const at::Tensor& param : trial.net->parameters()) {
    result.params.push_back(whole(param));
    result.grads.push_back(param.grad().defined() ? whole(param.grad()) : at::Tensor());
  }
  return result;
}

std::vector<Result> run_plain(const Scenario& scenario, const std::vector<int64_t>& hidden,
                              int world) {
  std::vector<Result> results;
  for (int rank = 0; rank < world; ++rank) {
    Trial trial{.net = make_net(hidden), .fsdp = {}, .rank = rank, .seen = {}};
    scenario(trial);
    results.push_back(result_of(trial));
  }
  return results;
}

void compare(const char* what, size_t index, const at::Tensor& got, const at::Tensor& want) {
  ASSERT_EQ(got.defined(), want.defined()) << what << " " << index;
  if (got.defined()) {
    EXPECT_TRUE(at::equal(got, want)) << what << " " << index << "\ngot\n"
                                      << got << "\nwant\n"
                                      << want;
  }
}

void compare(const Result& got, const std::vector<Result>& plain, int rank) {
  const Result& own = plain[rank];
  ASSERT_EQ(got.seen.size(), own.seen.size());
  for (size_t i = 0; i < own.seen.size(); ++i) {
    compare("output", i, got.seen[i], own.seen[i]);
  }
  for (size_t i = 0; i < own.params.size(); ++i) {
    compare("parameter", i, got.params[i], own.params[i]);
    at::Tensor mean;
    for (const Result& result : plain) {
      if (result.grads[i].defined()) {
        mean = mean.defined() ? mean + result.grads[i] : result.grads[i];
      }
    }
    if (mean.defined()) {
      mean = mean / static_cast<double>(plain.size());
    }
    compare("gradient", i, got.grads[i], mean);
  }
}

std::string name_of(const ReshardAfterForward& reshard) {
  const bool* flag = std::get_if<bool>(&reshard);
  const int* k = std::get_if<int>(&reshard);
  return k != nullptr ? std::to_string(*k) : flag == nullptr ? "unset" : *flag ? "true" : "false";
}

}  // namespace

BlockImpl::BlockImpl(int64_t width, int64_t hidden) {
  register_parameter("w", w, at::empty({hidden, width}, at::kDouble));
  register_parameter("v", v, at::empty({width, hidden}, at::kDouble));
}

at::Tensor BlockImpl::forward(const at::Tensor& x) {
  on_forward();
  // Without a slope it is relu, which LibTorch has not for meta tensors.
  at::Tensor y = at::linear(at::leaky_relu(at::linear(x, w), 0), v);
  on_forward();
  return y;
}

NetImpl::NetImpl(const std::vector<int64_t>& hidden) {
  std::vector<int> all;
  for (const int64_t size : hidden) {
    all.push_back(static_cast<int>(blocks.size()));
    blocks.push_back(register_module("block" + std::to_string(blocks.size()), Block(kWidth, size)));
  }
  register_parameter("scale", scale, at::empty({kWidth}, at::kDouble));
  path = along(all);
}

at::Tensor NetImpl::forward(const at::Tensor& x) { return path(*this, x) * scale; }

NetImpl::Path along(std::vector<int> indices) {
  return [indices](NetImpl& net, at::Tensor x) {
    for (const int index : indices) {
      x = net.blocks[index](x);
    }
    return x;
  };
}

at::Tensor Trial::input(int k) const {
  auto generator = at::detail::createCPUGenerator(100 + 10 * k + rank);
  return at::randint(-2, 3, {4, kWidth}, generator, at::kDouble).to(net->scale.device());
}

at::Tensor Trial::loss(int k) {
  at::Tensor y = net(input(k)).sum() * kLossFactor;
  seen.push_back(y.detach().clone());
  return y;
}

void Trial::update() {
  const c10::NoGradGuard no_grad;
  for (at::Tensor& param : net->parameters()) {
    param.mul_(-1).add_(1);
  }
}

void Trial::zero_grad() {
  for (at::Tensor& param : net->parameters()) {
    param.mutable_grad().reset();
  }
}

Trial make_sharded(comm::Runtime& runtime, const std::vector<int64_t>& hidden,
                   const FullyShardOptions& options) {
  FullyShardOptions with = options;
  with.mesh = mesh::DeviceMesh::create(runtime, {runtime.world_size()});
  Trial trial{.net = make_net(hidden), .fsdp = {}, .rank = runtime.rank(), .seen = {}};
  for (Block& block : trial.net->blocks) {
    fully_shard(*block, with);
  }
  trial.fsdp = fully_shard(*trial.net, with);
  return trial;
}

void expect_as_plain(const Scenario& scenario, const ScenarioOptions& options) {
  for (const int world : options.worlds) {
    const std::vector<Result> plain = run_plain(scenario, options.hidden, world);
    std::vector<ReshardAfterForward> reshards = options.reshards;
    if (world == 8) {
      reshards.emplace_back(2);
    }
    for (const ReshardAfterForward& reshard : reshards) {
      for (const auto schedule : {sim::Schedule::kLazy, sim::Schedule::kRandom}) {
        SCOPED_TRACE("world " + std::to_string(world) + ", reshard_after_forward " +
                     name_of(reshard) + (schedule == sim::Schedule::kLazy ? ", lazy" : ", random"));
        sim::run_world(world, {.seed = 5, .schedule = schedule}, [&](comm::Runtime& runtime) {
          Trial trial = make_sharded(runtime, options.hidden, {.reshard_after_forward = reshard});
          scenario(trial);
          compare(result_of(trial), plain, runtime.rank());
        });
        if (::testing::Test::HasFailure()) {
          return;
        }
      }
    }
  }
}

}  // namespace ppfsdp::fsdp::testing
