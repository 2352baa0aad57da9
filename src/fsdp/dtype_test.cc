// Dtypes of a group's parameters, gathers, gradients, inputs and outputs.
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sim/mesh/world.h"
#include "src/comm/reduction.h"
#include "src/dtensor/dtensor.h"
#include "src/fsdp/fully_shard.h"
#include "src/mesh/device_mesh.h"
#include "src/nn/module.h"

namespace ppfsdp::fsdp {
namespace {

using ::testing::HasSubstr;

mesh::DeviceMeshPtr world_mesh(comm::Runtime& runtime) {
  return mesh::DeviceMesh::create(runtime, {runtime.world_size()});
}

at::Tensor numbers(at::IntArrayRef sizes, at::ScalarType dtype, int64_t first) {
  return (at::arange(c10::multiply_integers(sizes)) % 50 + first).view(sizes).to(dtype);
}

/// Parameters of many dtypes and sizes that fit no rank count; `seen` keeps what forward read.
class ManyImpl : public nn::Module {
 public:
  ManyImpl() {
    register_parameter("half", half, numbers({3}, at::kBFloat16, 1), false);
    register_parameter("single", single, numbers({5, 1}, at::kFloat, 2));
    register_parameter("bytes", bytes, numbers({7}, at::kByte, 3), false);
    register_parameter("wide", wide, numbers({1, 3}, at::kDouble, 4), false);
    register_parameter("none", none, at::empty({0, 3}, at::kFloat));
    register_parameter("one", one, numbers({1}, at::kFloat, 5));
  }
  at::Tensor forward(const at::Tensor& x) {
    seen.clear();
    for (const at::Tensor& param : {half, single, bytes, wide, none, one}) {
      seen.push_back(param.detach().clone());
    }
    input_dtype = x.scalar_type();
    return single.sum() * x + one + none.sum();
  }
  at::Tensor half, single, bytes, wide, none, one;
  std::vector<at::Tensor> seen;
  at::ScalarType input_dtype = at::kFloat;
};
PPFSDP_MODULE(Many);

const std::vector<int> kWorlds = {1, 2, 3, 5, 8};

// Odd counts of narrow dtypes must not shift, or misalign, what lies behind them; no rows and fewer
// rows than ranks are shards too.
TEST(Dtype, MixedDtypesInOneGroupArriveUnchanged) {
  Many plain;
  plain(at::ones({1}));
  for (const int world : kWorlds) {
    for (const ReshardAfterForward& reshard :
         {ReshardAfterForward(true), ReshardAfterForward(false), ReshardAfterForward(2)}) {
      if (std::holds_alternative<int>(reshard) && world % 2 != 0) continue;
      sim::run_world(world, {.schedule = sim::Schedule::kLazy}, [&](comm::Runtime& runtime) {
        Many model;
        fully_shard(*model, {.mesh = world_mesh(runtime), .reshard_after_forward = reshard});
        for (int step = 0; step < 2; ++step) {
          model(at::ones({1})).sum().backward();
          for (size_t i = 0; i < plain->seen.size(); ++i) {
            EXPECT_EQ(model->seen[i].scalar_type(), plain->seen[i].scalar_type());
            EXPECT_TRUE(at::equal(model->seen[i], plain->seen[i])) << world << " " << i;
          }
        }
        auto params = model->named_parameters();
        EXPECT_TRUE(
            at::equal(dtensor::full_tensor(params["single"].grad()), at::full({5, 1}, 2.0F)));
        EXPECT_FALSE(params["half"].grad().defined());
        EXPECT_EQ(params["none"].grad().sizes(), (at::IntArrayRef{0, 3}));
      });
    }
  }
}

// param_dtype is for floating-point parameters: integers, such as quantised weights, stay.
TEST(Dtype, ParamDtypeCastsFloatingPointParametersOnly) {
  Many plain;
  plain(at::ones({1}));
  for (const int world : kWorlds) {
    sim::run_world(world, {.schedule = sim::Schedule::kRandom}, [&](comm::Runtime& runtime) {
      Many model;
      fully_shard(*model,
                  {.mesh = world_mesh(runtime),
                   .reshard_after_forward = true,
                   .mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
      model(at::ones({1})).sum().backward();
      for (size_t i = 0; i < plain->seen.size(); ++i) {
        const bool floating = plain->seen[i].is_floating_point();
        EXPECT_EQ(model->seen[i].scalar_type(), floating ? at::kBFloat16 : at::kByte);
        // The numbers are small integers, which bf16 holds.
        EXPECT_TRUE(at::equal(model->seen[i].to(at::kDouble), plain->seen[i].to(at::kDouble)));
      }
      EXPECT_EQ(model->named_parameters()["one"].grad().scalar_type(), at::kFloat);
    });
  }
}

class ScaleImpl : public nn::Module {
 public:
  ScaleImpl() { register_parameter("a", a, at::ones({5})); }
  at::Tensor forward(const at::Tensor& x) {
    input_dtype = x.scalar_type();
    return x * a;
  }
  at::Tensor a;
  at::ScalarType input_dtype = at::kFloat;
};
PPFSDP_MODULE(Scale);

// The gradients that fp16 must not overflow on are divided before the sum by a power of two and
// after it by the rest.
TEST(Dtype, Fp16GradientsAreDividedBeforeAndAfterTheSum) {
  for (const auto& [world, pre] :
       std::vector<std::pair<int, double>>{{2, 2}, {3, 2}, {5, 2}, {6, 4}, {7, 2}, {8, 4}}) {
    const comm::ReductionOrder order = comm::ReductionOrder::kGlooRing;
    const int64_t chunk = (5 + world - 1) / world;
    std::vector<at::Tensor> buffers;
    for (int rank = 0; rank < world; ++rank) {
      at::Tensor buffer = at::full({chunk * world}, 0, at::kHalf);
      buffer.narrow(0, 0, 5).copy_(numbers({5}, at::kHalf, 1) * 1201 + 7 * rank);
      buffers.push_back(buffer.div_(pre));
    }
    at::Tensor want = at::empty_like(buffers[0]);
    comm::reduce_range(order, comm::ReduceOp::sum(), buffers, 0, want.numel(), want);
    want = want.div_(world / pre).narrow(0, 0, 5);
    EXPECT_TRUE(want.isfinite().all().item<bool>());
    sim::run_world(
        world, {.schedule = sim::Schedule::kLazy, .order = order}, [&](comm::Runtime& runtime) {
          Scale model;
          fully_shard(*model, {.mesh = world_mesh(runtime),
                               .mp_policy = {.param_dtype = at::kHalf, .reduce_dtype = at::kHalf}});
          const at::Tensor x = numbers({5}, at::kHalf, 1) * 1201 + 7 * runtime.rank();
          model(x).sum().backward();
          const at::Tensor got = dtensor::full_tensor(model->parameters()[0].grad());
          EXPECT_TRUE(at::equal(got, want.to(at::kFloat))) << world << "\n" << got << want;
        });
  }
}

TEST(Dtype, InputsAndOutputsAreCastAsThePolicySays) {
  sim::run_world(2, {}, [](comm::Runtime& runtime) {
    const auto run = [&](const MixedPrecisionPolicy& policy) {
      Scale model;
      fully_shard(*model, {.mesh = world_mesh(runtime), .mp_policy = policy});
      at::Tensor y = model(at::ones({5}));
      y.sum().backward();
      EXPECT_EQ(model->parameters()[0].grad().scalar_type(), at::kFloat);
      return std::pair(model->input_dtype, y.scalar_type());
    };
    using Pair = std::pair<at::ScalarType, at::ScalarType>;
    EXPECT_EQ(run({.param_dtype = at::kBFloat16}), Pair(at::kBFloat16, at::kBFloat16));
    EXPECT_EQ(run({.param_dtype = at::kBFloat16, .output_dtype = at::kDouble}),
              Pair(at::kBFloat16, at::kDouble));
    EXPECT_EQ(run({.param_dtype = at::kBFloat16, .cast_forward_inputs = false}),
              Pair(at::kFloat, at::kFloat));
    EXPECT_EQ(run({.output_dtype = at::kHalf}), Pair(at::kFloat, at::kHalf));
  });
}

class TwoDtypesImpl : public nn::Module {
 public:
  TwoDtypesImpl() {
    register_parameter("a", a, at::ones({3}));
    register_parameter("b", b, at::ones({3}, at::kDouble), false);
  }
  at::Tensor forward(const at::Tensor& x) { return x * a * b; }
  at::Tensor a, b;
};
PPFSDP_MODULE(TwoDtypes);

// One reduce-scatter has one dtype: said when a parameter is unfrozen too, and not a hang.
TEST(Dtype, TrainableParametersOfTwoDtypesAreRefused) {
  const auto run = [](bool unfreeze_late) {
    sim::run_world(2, {}, [&](comm::Runtime& runtime) {
      TwoDtypes model;
      if (!unfreeze_late) model->b.set_requires_grad(true);
      fully_shard(*model, {.mesh = world_mesh(runtime)});
      model(at::ones({3})).sum().backward();
      model->parameters()[1].set_requires_grad(true);
      model(at::ones({3})).sum().backward();
    });
  };
  for (const bool late : {false, true}) {
    try {
      run(late);
      ADD_FAILURE() << "no error";
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what_without_backtrace(), HasSubstr("must have one dtype"));
    }
  }
}

}  // namespace
}  // namespace ppfsdp::fsdp
