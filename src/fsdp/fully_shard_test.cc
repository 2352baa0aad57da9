#include "src/fsdp/fully_shard.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "sim/mesh/world.h"
#include "src/comm/single_runtime.h"
#include "src/dtensor/dtensor.h"
#include "src/fsdp/param_group.h"
#include "src/fsdp/state.h"
#include "src/fsdp/testing/mlp.h"
#include "src/mesh/device_mesh.h"

namespace ppfsdp::fsdp {
namespace {

using ::testing::HasSubstr;
using testing::Layer;
using testing::make_mlp;
using testing::Mlp;
using testing::MlpReference;
using testing::shard_mlp;
using testing::train_reference;
using testing::train_sharded;

// Uneven over every world: rows of 15, 7, 3 and 1.
const std::vector<int64_t> kWidths = {16, 15, 7, 3, 1};

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

struct Case {
  int world;
  ReshardAfterForward reshard;
  int microbatches = 1;
  MixedPrecisionPolicy policy = {};
  sim::Schedule schedule = sim::Schedule::kRoundRobin;
  comm::ReductionOrder order = comm::ReductionOrder::kGlooRing;
};

void expect_equal_to_one_device(const Case& c) {
  const MlpReference config{.widths = kWidths,
                            .world = c.world,
                            .steps = 3,
                            .microbatches = c.microbatches,
                            .order = c.order,
                            .policy = c.policy};
  const auto expected = train_reference(config);
  sim::run_world(c.world, {.seed = 7, .schedule = c.schedule, .order = c.order},
                 [&](comm::Runtime& runtime) {
                   const auto params = train_sharded(config, runtime, c.reshard);
                   ASSERT_EQ(params.size(), expected.size());
                   for (size_t i = 0; i < params.size(); ++i) {
                     EXPECT_TRUE(at::equal(params[i], expected[i]))
                         << "rank " << runtime.rank() << " parameter " << i;
                   }
                 });
}

// The claim of the whole project, on the smallest model: three steps, bit for bit, for every way of
// resharding. A gather of stale shards, a lost or doubled gradient or a wrong average breaks it.
TEST(FullyShard, EqualsOneDeviceForEveryReshardAfterForward) {
  for (const int world : {1, 2, 3, 4, 5, 8}) {
    for (const ReshardAfterForward& reshard :
         {ReshardAfterForward(), ReshardAfterForward(true), ReshardAfterForward(false)}) {
      expect_equal_to_one_device({.world = world, .reshard = reshard});
    }
  }
  expect_equal_to_one_device({.world = 4, .reshard = 2});
  expect_equal_to_one_device({.world = 6, .reshard = 3});
  expect_equal_to_one_device({.world = 8, .reshard = 2});
}

// Side streams run at other times, and ranks in another order, under another schedule; no result
// may move.
TEST(FullyShard, EqualsOneDeviceUnderRandomSchedulesAndEveryOrder) {
  using comm::ReductionOrder;
  for (const auto order : {ReductionOrder::kRankOrder, ReductionOrder::kGlooRing,
                           ReductionOrder::kNcclRing, ReductionOrder::kTree}) {
    expect_equal_to_one_device(
        {.world = 5, .reshard = true, .schedule = sim::Schedule::kRandom, .order = order});
  }
}

// Unsynchronised microbatches must add up before the one reduction, in reduce_dtype.
TEST(FullyShard, EqualsOneDeviceWithAccumulationAndMixedPrecision) {
  const MixedPrecisionPolicy bf16_compute{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  const MixedPrecisionPolicy bf16{.param_dtype = at::kBFloat16};
  const MixedPrecisionPolicy bf16_reduce{.reduce_dtype = at::kBFloat16};
  for (const int world : {1, 3, 4}) {
    for (const int microbatches : {1, 3}) {
      expect_equal_to_one_device({.world = world, .reshard = true, .microbatches = microbatches});
      for (const auto& policy : {bf16_compute, bf16, bf16_reduce}) {
        expect_equal_to_one_device(
            {.world = world, .reshard = {}, .microbatches = microbatches, .policy = policy});
      }
    }
  }
  expect_equal_to_one_device({.world = 4, .reshard = 2, .microbatches = 3, .policy = bf16_compute});
}

// One all-gather and one reduce-scatter a group, and none where the flag says that none is needed.
TEST(FullyShard, IssuesTheFewestCollectives) {
  const uint64_t groups = kWidths.size();  // four layers and the model's own scale
  const auto count = [&](ReshardAfterForward reshard, bool sync) {
    uint64_t collectives = 0;
    sim::run_world(2, {}, [&](comm::Runtime& runtime) {
      Mlp model = make_mlp(kWidths, 1);
      FSDPModule fsdp =
          shard_mlp(model, {.mesh = world_mesh(runtime), .reshard_after_forward = reshard});
      fsdp.set_requires_gradient_sync(sync);
      const uint64_t before = runtime.world()->sequence();
      model(testing::batch(kWidths[0], 0, 0, 0)).sum().backward();
      collectives = runtime.world()->sequence() - before;
    });
    return collectives;
  };
  EXPECT_EQ(count(true, true), 3 * groups);
  EXPECT_EQ(count({}, true), 3 * groups - 1);
  EXPECT_EQ(count(false, true), 2 * groups);
  EXPECT_EQ(count(true, false), 2 * groups);
}

// Memory is freed when the flag says so, and the registered parameters are shards at all times.
TEST(FullyShard, ReshardsAfterForwardAndBackward) {
  const auto unsharded_after_forward = [&](ReshardAfterForward reshard) {
    std::vector<bool> result;
    sim::run_world(2, {}, [&](comm::Runtime& runtime) {
      Mlp model = make_mlp({4, 4, 4}, 1);
      FSDPModule fsdp =
          shard_mlp(model, {.mesh = world_mesh(runtime), .reshard_after_forward = reshard});
      const auto states = fsdp.state().states_below();
      const at::Tensor y = model(testing::batch(4, 0, 0, 0));
      std::vector<bool> now;
      for (FSDPState* state : states) {
        now.push_back(state->group()->is_unsharded());
      }
      y.sum().backward();
      for (FSDPState* state : states) {
        EXPECT_FALSE(state->group()->is_unsharded());
      }
      for (const at::Tensor& param : model->parameters()) {
        EXPECT_TRUE(dtensor::is_dtensor(param));
        EXPECT_TRUE(dtensor::is_dtensor(param.grad()));
      }
      result = now;
    });
    return result;
  };
  using Flags = std::vector<bool>;  // root first
  EXPECT_EQ(unsharded_after_forward({}), (Flags{true, false, false}));
  EXPECT_EQ(unsharded_after_forward(true), (Flags{false, false, false}));
  EXPECT_EQ(unsharded_after_forward(false), (Flags{true, true, true}));
}

// A forward without backward must not leave parameters that a later change of the shards makes
// stale.
TEST(FullyShard, GathersAgainAfterTheShardsChange) {
  sim::run_world(2, {}, [&](comm::Runtime& runtime) {
    Mlp model = make_mlp({4, 4}, 1);
    shard_mlp(model, {.mesh = world_mesh(runtime), .reshard_after_forward = false});
    const at::Tensor x = testing::batch(4, 0, 0, 0);
    const c10::NoGradGuard no_grad;
    const at::Tensor before = model(x);
    model->parameters()[0].mul_(2.0);
    EXPECT_TRUE(at::equal(model(x), before * 2.0));
  });
}

// Tied parameters are one parameter: one gradient that has both uses, also on an uneven last rank
// (pytorch 176076), and one entry for the optimizer.
class TiedImpl : public nn::Module {
 public:
  TiedImpl() {
    const at::Tensor value = at::ones({5, 5}) * 0.5;
    register_parameter("a", a, value);
    register_parameter("b", b, a);
  }
  at::Tensor forward(const at::Tensor& x) { return x.matmul(a).matmul(b); }
  at::Tensor a;
  at::Tensor b;
};
PPFSDP_MODULE(Tied);

TEST(FullyShard, TiedParametersAreOne) {
  Tied plain;
  plain(at::ones({1, 5})).sum().backward();
  sim::run_world(3, {}, [&](comm::Runtime& runtime) {
    Tied model;
    fully_shard(*model, {.mesh = world_mesh(runtime)});
    ASSERT_EQ(model->parameters().size(), 1u);
    model(at::ones({1, 5})).sum().backward();
    // Small integers and halves: exact in any order, and the average of equal gradients is the
    // same.
    EXPECT_TRUE(at::equal(dtensor::full_tensor(model->parameters()[0].grad()), plain->a.grad()));
  });
}

// Frozen parameters are gathered but not reduced; unfreezing them later must work (pytorch 186998).
TEST(FullyShard, FrozenParametersGetNoGradientUntilUnfrozen) {
  sim::run_world(3, {}, [&](comm::Runtime& runtime) {
    Mlp model = make_mlp({4, 5, 3}, 1);
    model->layers[0]->w.set_requires_grad(false);
    shard_mlp(model, {.mesh = world_mesh(runtime),
                      .mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
    auto params = model->named_parameters();
    const at::Tensor x = testing::batch(4, runtime.rank(), 0, 0);
    model(x).sum().backward();
    EXPECT_FALSE(params["layer0.w"].grad().defined());
    EXPECT_TRUE(params["layer0.b"].grad().defined());
    params["layer0.w"].set_requires_grad(true);
    model(x).sum().backward();
    ASSERT_TRUE(params["layer0.w"].grad().defined());
    EXPECT_EQ(params["layer0.w"].grad().scalar_type(), at::kFloat);
  });
}

// Gradients that are not cleared add up, sharded, as a plain model's do.
TEST(FullyShard, ShardedGradientsAddUp) {
  sim::run_world(2, {}, [&](comm::Runtime& runtime) {
    Mlp model = make_mlp({4, 4}, 1);
    shard_mlp(model, {.mesh = world_mesh(runtime)});
    const at::Tensor x = testing::batch(4, 0, 0, 0);
    model(x).sum().backward();
    const at::Tensor once = dtensor::full_tensor(model->parameters()[1].grad()).clone();
    model(x).sum().backward();
    EXPECT_TRUE(at::equal(dtensor::full_tensor(model->parameters()[1].grad()), once * 2));
    EXPECT_GT(once.abs().max().item<float>(), 0);
  });
}

// With one rank nothing is copied: what forward reads is the shard's own memory.
TEST(FullyShard, OneRankAliases) {
  const auto runtime = comm::make_single_runtime();
  Mlp model = make_mlp({4, 4}, 1);
  FSDPModule fsdp = shard_mlp(model, {.mesh = world_mesh(*runtime)});
  fsdp.unshard();
  EXPECT_EQ(model->scale.data_ptr(), dtensor::local_of(model->parameters()[0]).data_ptr());
  EXPECT_EQ(runtime->world()->sequence(), 0u);
}

// What a user can get wrong must be said, with the name, before anything hangs or reads garbage.
class NoSlotImpl : public nn::Module {
 public:
  NoSlotImpl() { torch::nn::Module::register_parameter("orphan", at::ones({2})); }
};
class OddParameterImpl : public nn::Module {
 public:
  explicit OddParameterImpl(const at::Tensor& value) { register_parameter("odd", odd, value); }
  at::Tensor odd;
};

TEST(FullyShard, RefusesWhatItCannotShard) {
  sim::run_world(4, {}, [](comm::Runtime& runtime) {
    const FullyShardOptions options{.mesh = world_mesh(runtime)};
    const auto shard = [&](nn::Module& module, FullyShardOptions with) {
      return error_of([&] { fully_shard(module, with); });
    };
    NoSlotImpl no_slot;
    EXPECT_THAT(shard(no_slot, options), HasSubstr("'orphan' has no slot"));
    OddParameterImpl scalar(at::ones({}));
    EXPECT_THAT(shard(scalar, options), HasSubstr("'odd' is a scalar"));
    OddParameterImpl strided(at::ones({2, 3}).t());
    EXPECT_THAT(shard(strided, options), HasSubstr("not contiguous"));
    Mlp model = make_mlp({4, 4}, 1);
    EXPECT_THAT(shard(*model, {}), HasSubstr("mesh is null"));
    EXPECT_THAT(shard(*model, {.mesh = mesh::DeviceMesh::create(runtime, {2, 2})}),
                HasSubstr("must be 1D, got DeviceMesh(2, 2)"));
    EXPECT_THAT(
        shard(*model, {.mesh = options.mesh, .reshard_after_forward = 3}),
        HasSubstr("reshard_after_forward = 3 must be a positive divisor of the shard size 4"));
    EXPECT_THAT(shard(*model, {.mesh = options.mesh, .mp_policy = {.param_dtype = at::kInt}}),
                HasSubstr("mp_policy.param_dtype must be a floating-point dtype"));
    EXPECT_THAT(error_of([&] { fsdp_module(*model); }), HasSubstr("was not applied"));
    fully_shard(*model, options);
    EXPECT_THAT(shard(*model, options), HasSubstr("fully sharded already"));
    EXPECT_THAT(shard(*model->layers[0], options), HasSubstr("bottom-up"));
  });
}

// A tie across groups would silently untie the parameter.
class OuterImpl : public nn::Module {
 public:
  OuterImpl() {
    layer = register_module("layer", Layer(3, 3));
    register_parameter("tied", tied, layer->w);
  }
  Layer layer{nullptr};
  at::Tensor tied;
};

TEST(FullyShard, RefusesATieAcrossGroups) {
  const auto runtime = comm::make_single_runtime();
  const FullyShardOptions options{.mesh = world_mesh(*runtime)};
  OuterImpl outer;
  fully_shard(*outer.layer, options);
  EXPECT_THAT(error_of([&] { fully_shard(outer, options); }), HasSubstr("is tied to 'w'"));
}

// A child that ran first has become a root with streams of its own: mixing the two would race.
TEST(FullyShard, RefusesAChildThatRanFirst) {
  const auto runtime = comm::make_single_runtime();
  Mlp model = make_mlp({4, 4}, 1);
  shard_mlp(model, {.mesh = world_mesh(*runtime)});
  const at::Tensor x = testing::batch(4, 0, 0, 0);
  model->layers[0](x);
  EXPECT_THAT(error_of([&] { model(x); }), HasSubstr("'layer0' ran forward before its root"));
}

}  // namespace
}  // namespace ppfsdp::fsdp
