// Models that are built on meta, sharded there, and get their memory afterwards.
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "sim/mesh/world.h"
#include "src/comm/single_runtime.h"
#include "src/dtensor/dtensor.h"
#include "src/fsdp/fully_shard.h"
#include "src/mesh/device_mesh.h"
#include "src/nn/linear.h"
#include "src/nn/module.h"
#include "src/nn/to_empty.h"

namespace ppfsdp::fsdp {
namespace {

using dtensor::Placement;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kWidth = 3;
const std::vector<int> kWorlds = {1, 2, 3, 5, 8};

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

mesh::DeviceMeshPtr world_mesh(comm::Runtime& runtime) {
  return mesh::DeviceMesh::create(runtime, {runtime.world_size()});
}

/// Small integers that start with `first`, in the sharded parameter or in a plain one.
void number(const at::Tensor& parameter, int64_t first) {
  const c10::NoGradGuard no_grad;
  const at::Tensor values = (at::arange(c10::multiply_integers(parameter.sizes())) % 5 + first - 3)
                                .view(parameter.sizes())
                                .to(parameter.scalar_type());
  if (dtensor::is_dtensor(parameter)) {
    const dtensor::Spec& spec = *dtensor::spec_of(parameter);
    parameter.copy_(dtensor::distribute_tensor(values, spec.mesh, spec.placements));
  } else {
    parameter.copy_(values);
  }
}

/// x w^T v + b, with a frozen b of another dtype. Values are small integers: sums are exact.
class BlockImpl : public nn::Module {
 public:
  BlockImpl(int64_t hidden, at::TensorOptions options) {
    register_parameter("w", w, at::empty({hidden, kWidth}, options.dtype(at::kDouble)));
    register_parameter("v", v, at::empty({hidden, kWidth}, options.dtype(at::kDouble)));
    register_parameter("b", b, at::empty({1, kWidth}, options.dtype(at::kFloat)), false);
    reset_parameters();
  }
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, w).matmul(v) + b; }
  void reset_parameters() override {
    int64_t first = 1;
    for (const auto& item : named_parameters(/*recurse=*/false)) number(item.value(), first++);
  }
  at::Tensor w, v, b;
};
PPFSDP_MODULE(Block);

/// Blocks, a parameter of the model's own that is tied, and a buffer.
class NetImpl : public nn::Module {
 public:
  explicit NetImpl(at::TensorOptions options = {}) {
    for (const int64_t hidden : {5, 7, 1}) {
      const std::string name = "block" + std::to_string(blocks.size());
      blocks.push_back(register_module(name, Block(hidden, options)));
    }
    register_parameter("scale", scale, at::empty({kWidth}, options.dtype(at::kDouble)));
    register_parameter("again", again, scale);
    register_buffer("shift", shift, at::empty({kWidth}, options.dtype(at::kDouble)), false);
    reset_parameters();
  }
  at::Tensor forward(at::Tensor x) {
    for (Block& block : blocks) x = block(x);
    return (x * scale + shift) * again;
  }
  void reset_parameters() override {
    number(named_parameters(/*recurse=*/false)["scale"], 2);
    if (!shift.is_meta()) number(shift, 1);
  }
  std::vector<Block> blocks;
  at::Tensor scale, again, shift;
};
PPFSDP_MODULE(Net);

FSDPModule shard(Net& net, comm::Runtime& runtime, ReshardAfterForward reshard = {}) {
  const FullyShardOptions options{.mesh = world_mesh(runtime), .reshard_after_forward = reshard};
  for (Block& block : net->blocks) fully_shard(*block, options);
  return fully_shard(*net, options);
}

at::Tensor input(int rank, int step) {
  return (at::arange(2 * kWidth, at::kDouble) - rank - step).view({2, kWidth});
}

/// Losses, and afterwards the parameters in full, of two steps that keep values small.
std::vector<at::Tensor> train(Net& net, int rank) {
  std::vector<at::Tensor> seen;
  for (int step = 0; step < 2; ++step) {
    for (const at::Tensor& parameter : net->parameters()) parameter.mutable_grad().reset();
    const at::Tensor loss = net(input(rank, step)).sum();
    seen.push_back(loss.detach().clone());
    loss.backward();
    const c10::NoGradGuard no_grad;
    for (const at::Tensor& parameter : net->parameters()) {
      if (parameter.grad().defined()) {
        seen.push_back(dtensor::full_tensor(parameter.grad()).clone());
        parameter.mul_(-1).add_(1);
      }
    }
  }
  const c10::NoGradGuard no_grad;
  for (const at::Tensor& parameter : net->parameters()) {
    seen.push_back(dtensor::full_tensor(parameter).clone());
  }
  return seen;
}

void expect_equal(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::equal(got[i], want[i])) << i;
}

// Nothing is materialised before to_empty; then every rank has its shards alone, and trains as if
// the model had been built in the usual way.
TEST(Meta, TrainsAsAModelThatWasBuiltOnItsDevice) {
  for (const int world : kWorlds) {
    for (const ReshardAfterForward& reshard :
         {ReshardAfterForward(), ReshardAfterForward(true), ReshardAfterForward(false)}) {
      sim::run_world(world, {.schedule = sim::Schedule::kRandom}, [&](comm::Runtime& runtime) {
        Net net(at::TensorOptions(at::kMeta));
        shard(net, runtime, reshard);
        for (const at::Tensor& parameter : net->parameters()) {
          EXPECT_TRUE(dtensor::is_dtensor(parameter));
          EXPECT_TRUE(parameter.is_meta());
          EXPECT_TRUE(dtensor::local_of(parameter).is_meta());
        }
        EXPECT_TRUE(net->shift.is_meta());
        nn::to_empty(*net, runtime.device());
        nn::reset_all_parameters(*net);
        Net plain;
        shard(plain, runtime, reshard);
        expect_equal(train(net, runtime.rank()), train(plain, runtime.rank()));
      });
      if (HasFailure()) return;
    }
  }
}

// The all-gather sends the group's one buffer as it stands: shards must lie in it, and what is
// between them be zero.
TEST(Meta, ShardsLieInOneBufferWithZeroPadding) {
  for (const int world : kWorlds) {
    sim::run_world(world, {}, [&](comm::Runtime& runtime) {
      Net net(at::TensorOptions(at::kMeta));
      shard(net, runtime);
      nn::to_empty(*net, runtime.device());
      for (Block& block : net->blocks) {
        at::Tensor bytes;
        for (const at::Tensor& parameter : block->parameters()) {
          const at::Tensor& local = dtensor::local_of(parameter);
          EXPECT_TRUE(local.numel() == 0 || !local.isfinite().any().item<bool>() ||
                      local.gt(1e30).all().item<bool>())
              << "memory without values must show";
          local.zero_();
          const at::Tensor all = at::empty({0}, at::kByte);
          all.set_(local.storage());
          EXPECT_TRUE(!bytes.defined() || bytes.is_alias_of(all));
          bytes = all;
        }
        EXPECT_FALSE(bytes.any().item<bool>()) << "padding";
      }
    });
  }
}

// Memory that was never given values must not train.
TEST(Meta, AForgottenResetIsNaN) {
  sim::run_world(2, {}, [](comm::Runtime& runtime) {
    Net net(at::TensorOptions(at::kMeta));
    shard(net, runtime);
    nn::to_empty(*net, runtime.device());
    EXPECT_TRUE(net(input(0, 0)).isnan().all().item<bool>());
  });
}

class WideImpl : public nn::Module {
 public:
  explicit WideImpl(int64_t layers) {
    for (int64_t i = 0; i < layers; ++i) {
      register_module(
          "layer" + std::to_string(i),
          nn::Linear(2, 2, nn::LinearImpl::Options{.bias = false, .tensor = at::kMeta}));
    }
  }
  at::Tensor forward(const at::Tensor& x) { return x; }
};
PPFSDP_MODULE(Wide);

// Buffers too, and each by its name; a long list is cut, not lost.
TEST(Meta, WhatIsLeftOnMetaIsNamedAtTheFirstForward) {
  sim::run_world(2, {}, [](comm::Runtime& runtime) {
    Net net(at::TensorOptions(at::kMeta));
    shard(net, runtime);
    EXPECT_THAT(
        error_of([&] { net(input(0, 0)); }),
        AllOf(HasSubstr("still on meta at the first forward: 'scale', 'block0.w', "),
              HasSubstr("'block2.b', 'shift'; call nn::to_empty"), Not(HasSubstr("again"))));
    nn::to_empty(*net->blocks[0], runtime.device());
    nn::to_empty(*net->blocks[1], runtime.device());
    nn::to_empty(*net, runtime.device(), /*recurse=*/false);
    EXPECT_THAT(
        error_of([&] { net(input(0, 0)); }),
        HasSubstr("still on meta at the first forward: 'block2.w', 'block2.v', 'block2.b';"));
    nn::to_empty(*net->blocks[2], runtime.device());
    nn::reset_all_parameters(*net);
    EXPECT_TRUE(at::equal(net(input(0, 0)), Net()(input(0, 0)))) << "the error has broken nothing";

    Wide wide(20);
    fully_shard(*wide, {.mesh = world_mesh(runtime)});
    EXPECT_THAT(error_of([&] { wide(at::ones({1})); }),
                HasSubstr("'layer14.weight', 'layer15.weight' and 4 more;"));
  });
}

// A group has one buffer, on one device: half of it would stay without values, silently.
TEST(Meta, AGroupThatIsPartlyOnMetaIsRefused) {
  const auto runtime = comm::make_single_runtime();
  class HalfImpl : public nn::Module {
   public:
    HalfImpl() {
      register_parameter("a", a, at::ones({2}));
      register_parameter("b", b, at::empty({2}, at::kMeta));
    }
    at::Tensor a, b;
  };
  HalfImpl half;
  EXPECT_THAT(error_of([&] { fully_shard(half, {.mesh = world_mesh(*runtime)}); }),
              HasSubstr("parameter 'a' is on cpu and 'b' on meta"));
}

// Also in the middle of training, unsharded or not: the new values are what forward uses next.
TEST(Meta, AModelCanBeMadeAnew) {
  for (const ReshardAfterForward& reshard :
       {ReshardAfterForward(true), ReshardAfterForward(false), ReshardAfterForward(2)}) {
    sim::run_world(4, {}, [&](comm::Runtime& runtime) {
      Net net;
      FSDPModule fsdp = shard(net, runtime, reshard);
      const std::vector<at::Tensor> first = train(net, runtime.rank());
      const c10::NoGradGuard no_grad;
      net(input(0, 0));
      fsdp.unshard();
      nn::to_empty(*net, runtime.device());
      for (const at::Tensor& parameter : net->parameters()) {
        EXPECT_FALSE(parameter.grad().defined()) << "a gradient of other values";
      }
      nn::reset_all_parameters(*net);
      const c10::AutoGradMode grad(true);
      expect_equal(train(net, runtime.rank()), first);
    });
  }
}

// dtypes may change between to_empty and the first forward.
TEST(Meta, ADtypeGivenLaterIsTheOneOfTheShards) {
  sim::run_world(3, {}, [](comm::Runtime& runtime) {
    Net net(at::TensorOptions(at::kMeta));
    shard(net, runtime);
    nn::to_empty(*net, runtime.device());
    nn::reset_all_parameters(*net);
    net->to(at::kFloat);
    const at::Tensor y = net(input(runtime.rank(), 0).to(at::kFloat));
    EXPECT_EQ(y.scalar_type(), at::kFloat);
    EXPECT_TRUE(at::equal(y.to(at::kDouble), Net()(input(runtime.rank(), 0))));
    y.sum().backward();
    EXPECT_EQ(net->scale.grad().scalar_type(), at::kFloat);
  });
}

// What the module has registered at the first forward is what trains: an optimizer has it.
TEST(Meta, ParametersThatWereRegisteredAnewAreTakenOver) {
  sim::run_world(3, {}, [](comm::Runtime& runtime) {
    const mesh::DeviceMeshPtr mesh = world_mesh(runtime);
    const auto like = [&](const at::Tensor& value) {
      return dtensor::distribute_tensor(value, mesh, {Placement::shard(0)}).requires_grad_();
    };
    Net net(at::TensorOptions(at::kMeta));
    shard(net, runtime);
    nn::to_empty(*net, runtime.device());
    nn::reset_all_parameters(*net);
    const at::Tensor mine = like(at::full({kWidth}, 7.0, at::kDouble));
    net->set_registered_parameter("scale", mine);
    EXPECT_THAT(error_of([&] { net(input(0, 0)); }), HasSubstr("'scale' was tied under 2 names"));
    net->set_registered_parameter("again", mine);
    EXPECT_TRUE(net->parameters()[0].is_same(mine));
    Net other;
    shard(other, runtime);
    net->blocks[0]->set_registered_parameter("b", at::ones({1, kWidth}));
    EXPECT_THAT(error_of([&] { net(input(0, 0)); }),
                AllOf(HasSubstr("'block0.b' has been replaced by a plain tensor of sizes [1, 3]"),
                      HasSubstr("[Shard(0)] on DeviceMesh(3)")));
    net->blocks[0]->set_registered_parameter(
        "b", dtensor::distribute_tensor(at::ones({1, kWidth}), mesh, {Placement::replicate()}));
    EXPECT_THAT(error_of([&] { net(input(0, 0)); }), HasSubstr("replaced by a DTensor [1, 3]"));
    const at::Tensor b = like(at::zeros({1, kWidth})).detach();
    net->blocks[0]->set_registered_parameter("b", b);
    Net plain;
    {
      const c10::NoGradGuard no_grad;
      plain->scale.fill_(7);
      plain->blocks[0]->b.zero_();
    }
    const at::Tensor y = net(input(0, 0));
    EXPECT_TRUE(at::equal(y, plain(input(0, 0))));
    y.sum().backward();
    EXPECT_TRUE(mine.grad().defined());
    EXPECT_FALSE(b.grad().defined());
  });
}

// Where the mesh computes is where everything goes, buffers too.
TEST(Meta, ParametersAndBuffersGoToTheMeshsDevice) {
  const auto runtime = comm::make_single_runtime(at::Device(at::kMeta));
  Net net;
  shard(net, *runtime);
  for (const at::Tensor& parameter : net->parameters()) EXPECT_TRUE(parameter.is_meta());
  EXPECT_TRUE(net->shift.is_meta());
  // A device that computes nothing, for simulated steps: what is there is no fault.
  EXPECT_TRUE(
      net(at::empty({2, kWidth}, at::TensorOptions(at::kDouble).device(at::kMeta))).is_meta());
}

TEST(Meta, ShardsGoToTheMeshsDeviceOnly) {
  const auto runtime = comm::make_single_runtime();
  Net net(at::TensorOptions(at::kMeta));
  shard(net, *runtime);
  EXPECT_THAT(error_of([&] { nn::to_empty(*net, at::Device(at::kCUDA, 0)); }),
              HasSubstr("compute on cpu, so their shards cannot be on cuda:0"));
}

}  // namespace
}  // namespace ppfsdp::fsdp
