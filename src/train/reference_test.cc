// The reference against literal formulas. That fully_shard equals it is shown by //golden and by
// //proptests; here it must be right on its own.
#include "src/train/reference.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "src/nn/linear.h"
#include "src/nn/module.h"
#include "src/optim/clip_grad_norm.h"

namespace ppfsdp::train {
namespace {

using ::testing::HasSubstr;

constexpr double kInf = std::numeric_limits<double>::infinity();

/// scale * second(first(x)); rows 5, 3 and 2, so that shards are uneven and some empty.
class NetImpl : public nn::Module {
 public:
  explicit NetImpl(uint64_t seed = 1) {
    at::manual_seed(seed);
    first = register_module("first", std::make_shared<nn::LinearImpl>(4, 5));
    second = register_module("second", std::make_shared<nn::LinearImpl>(5, 3));
    register_parameter("scale", scale, at::randn({2, 3}));
  }
  at::Tensor forward(const at::Tensor& x) { return second(first(x)).unsqueeze(1) * scale; }
  std::vector<nn::Module*> groups() { return {first.get(), second.get(), this}; }

  nn::Linear first = nullptr, second = nullptr;
  at::Tensor scale;
};
PPFSDP_MODULE(Net);

at::Tensor input(int rank, int microbatch) {
  at::manual_seed(10 * rank + microbatch);
  return at::randn({6, 4});
}

ReferenceTrainer::Loss loss_of(Net& net) {
  return [&net](int rank, int microbatch) { return net(input(rank, microbatch)).square().mean(); };
}

/// The gradients of one rank's microbatches on a plain model of its own.
std::vector<at::Tensor> rank_grads(int rank, int microbatches) {
  Net net;
  for (int m = 0; m < microbatches; ++m) loss_of(net)(rank, m).backward();
  std::vector<at::Tensor> result;
  for (const at::Tensor& parameter : net->parameters()) result.push_back(parameter.grad());
  return result;
}

TEST(ReferenceTrainer, OneRankIsPlainTraining) {
  Net net;
  ReferenceTrainer trainer(net->groups(), {});
  const auto losses = trainer.backward(2, loss_of(net));
  const std::vector<at::Tensor> expected = rank_grads(0, 2);
  const std::vector<at::Tensor> parameters = trainer.parameters();
  ASSERT_EQ(parameters.size(), 5u);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(at::equal(parameters[i].grad(), expected[i])) << i;
  }
  Net fresh;
  EXPECT_EQ(losses, (std::vector<std::vector<double>>{{loss_of(fresh)(0, 0).item<double>(),
                                                       loss_of(fresh)(0, 1).item<double>()}}));
}

TEST(ReferenceTrainer, InRankOrderIsTheSumFromLeftToRightDividedOnce) {
  for (const int world : {2, 3, 4, 5}) {
    Net net;
    ReferenceTrainer trainer(net->groups(),
                             {.world = world, .order = comm::ReductionOrder::kRankOrder});
    trainer.backward(2, loss_of(net));
    std::vector<at::Tensor> sum = rank_grads(0, 2);
    for (int rank = 1; rank < world; ++rank) {
      const std::vector<at::Tensor> grads = rank_grads(rank, 2);
      for (size_t i = 0; i < sum.size(); ++i) sum[i] = sum[i] + grads[i];
    }
    const std::vector<at::Tensor> parameters = trainer.parameters();
    for (size_t i = 0; i < sum.size(); ++i) {
      EXPECT_TRUE(at::equal(parameters[i].grad(), sum[i] / world)) << world << " " << i;
    }
  }
}

TEST(ReferenceTrainer, EveryOrderIsExactWhenAllRanksHaveTheSameBatch) {
  // Sums of equal values by a power of two are exact in any order: a shard in the wrong place, or a
  // wrong divisor, is all that could differ.
  for (const auto order : {comm::ReductionOrder::kRankOrder, comm::ReductionOrder::kGlooRing,
                           comm::ReductionOrder::kNcclRing, comm::ReductionOrder::kTree}) {
    Net net;
    ReferenceTrainer trainer(net->groups(), {.world = 4, .order = order});
    trainer.backward(1, [&](int, int) { return loss_of(net)(0, 0); });
    const std::vector<at::Tensor> expected = rank_grads(0, 1);
    const std::vector<at::Tensor> parameters = trainer.parameters();
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(at::equal(parameters[i].grad(), expected[i])) << comm::to_string(order) << i;
    }
  }
}

TEST(ReferenceTrainer, GlooRingFoldsTheWholeFlatBufferAndNotEachParameter) {
  // With 3 ranks the group of `first` is a flat buffer of 3 * (2 * 4 + 2) = 30 elements, in chunks
  // of 5 (Gloo's rule: 2 chunks a rank). Element 0 of the weight lies in chunk 0, which folds x2 +
  // x1 + x0 (the ranks before it, backwards, itself last).
  Net net;
  ReferenceTrainer trainer(net->groups(), {.world = 3, .order = comm::ReductionOrder::kGlooRing});
  trainer.backward(1, loss_of(net));
  const auto g = [](int rank) { return rank_grads(rank, 1)[1].flatten(); };
  // Order of named_parameters: scale, first.weight, first.bias, ...
  const at::Tensor weight = trainer.parameters()[1].grad().flatten();
  const at::Tensor backwards = (g(2) + g(1) + g(0)) / 3;
  EXPECT_TRUE(at::equal(weight.narrow(0, 0, 5), backwards.narrow(0, 0, 5)));
}

TEST(ReferenceTrainer, GradientsAddToThoseThatAreThere) {
  Net net;
  ReferenceTrainer trainer(net->groups(), {.world = 2});
  trainer.backward(1, loss_of(net));
  const at::Tensor once = net->scale.grad().clone();
  trainer.backward(1, loss_of(net));
  EXPECT_TRUE(at::equal(net->scale.grad(), once * 2));
}

TEST(ReferenceTrainer, LeavesSlotsAndParametersAsTheyWere) {
  Net net;
  const at::Tensor scale = net->scale;
  const at::Tensor before = scale.detach().clone();
  ReferenceTrainer trainer(net->groups(), {.world = 2, .param_dtype = at::kBFloat16});
  trainer.backward(1, [&](int rank, int microbatch) {
    EXPECT_EQ(net->scale.scalar_type(), at::kBFloat16);
    const at::Tensor y = net(input(rank, microbatch));
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    return y.to(at::kFloat).square().mean();
  });
  EXPECT_TRUE(net->scale.is_same(scale));
  EXPECT_TRUE(at::equal(scale.detach(), before));
  EXPECT_EQ(scale.grad().scalar_type(), at::kFloat);
}

TEST(ReferenceTrainer, AccumulatesInTheReduceDtype) {
  // Each microbatch's gradient of scale is bfloat16; 256 + 1 has no bfloat16, so a sum in it loses
  // the second microbatch.
  class ScaleImpl : public nn::Module {
   public:
    ScaleImpl() { register_parameter("scale", scale, at::zeros({1})); }
    at::Tensor scale;
  };
  const auto run = [](std::optional<at::ScalarType> reduce_dtype) {
    const auto module = std::make_shared<ScaleImpl>();
    ReferenceTrainer trainer(
        {module.get()}, {.world = 2, .param_dtype = at::kBFloat16, .reduce_dtype = reduce_dtype});
    trainer.backward(2, [&](int, int microbatch) {
      return (module->scale * (microbatch == 0 ? 256 : 1)).sum();
    });
    return module->scale.grad().item<double>();
  };
  EXPECT_EQ(run(std::nullopt), 256);
  EXPECT_EQ(run(at::kBFloat16), 256);
  EXPECT_EQ(run(at::kFloat), 257);
}

TEST(ReferenceTrainer, HalfPrecisionDividesBeforeItCanOverflow) {
  // 4 ranks with 30000 each: the sum is beyond float16's 65504, the mean is not.
  class ScaleImpl : public nn::Module {
   public:
    ScaleImpl() { register_parameter("scale", scale, at::zeros({1})); }
    at::Tensor scale;
  };
  const auto module = std::make_shared<ScaleImpl>();
  ReferenceTrainer trainer({module.get()}, {.world = 4, .reduce_dtype = at::kHalf});
  trainer.backward(1, [&](int, int) { return (module->scale * 30000).sum(); });
  EXPECT_EQ(module->scale.grad().item<double>(), 30000);
}

TEST(ReferenceTrainer, TiedParameterIsOneWithTheGradientOfBothUses) {
  class TiedImpl : public nn::Module {
   public:
    TiedImpl() {
      a = register_module(
          "a", std::make_shared<nn::LinearImpl>(3, 3, nn::LinearImpl::Options{.bias = false}));
      b = register_module("b", std::make_shared<nn::LinearImpl>(a->weight));
    }
    at::Tensor forward(const at::Tensor& x) { return b(a(x)); }
    nn::Linear a = nullptr, b = nullptr;
  };
  const auto tied = std::make_shared<TiedImpl>();
  ReferenceTrainer trainer({tied.get()}, {.world = 2});
  ASSERT_EQ(trainer.parameters().size(), 1u);
  const at::Tensor x = at::full({1, 3}, 1.0);
  trainer.backward(1, [&](int, int) { return tied->forward(x).sum(); });
  const at::Tensor grad = tied->a->weight.grad().clone();
  tied->a->weight.mutable_grad().reset();
  tied->forward(x).sum().backward();
  EXPECT_TRUE(at::equal(grad, tied->a->weight.grad()));
}

TEST(ReferenceTrainer, FrozenParametersGetNoGradient) {
  Net net;
  net->first->weight.set_requires_grad(false);
  ReferenceTrainer trainer(net->groups(), {.world = 3});
  EXPECT_EQ(trainer.parameters().size(), 4u);
  trainer.backward(1, loss_of(net));
  EXPECT_FALSE(net->first->weight.grad().defined());
  EXPECT_TRUE(net->first->bias.grad().defined());
}

TEST(ReferenceTrainer, ClipsByTheNormOfTheWhole) {
  for (const double p : {1.0, 2.0, 3.0, kInf}) {
    Net net, plain;
    ReferenceTrainer trainer(net->groups(), {.world = 4});
    trainer.backward(1, loss_of(net));
    const std::vector<at::Tensor> ours = trainer.parameters(), theirs = plain->parameters();
    for (size_t i = 0; i < ours.size(); ++i) theirs[i].mutable_grad() = ours[i].grad().clone();
    const double norm = trainer.clip_grad_norm_(0.01, p);
    const auto expected = optim::clip_grad_norm_(theirs, 0.01, p).item<double>();
    // The folds differ by some ulps of 6e-8; the norm must be beyond the limit for clipping to
    // show.
    EXPECT_GT(norm, 0.01);
    EXPECT_NEAR(norm / expected, 1, 1e-6);
    for (size_t i = 0; i < ours.size(); ++i) {
      EXPECT_TRUE(at::allclose(ours[i].grad(), theirs[i].grad(), 1e-6, 1e-12));
    }
  }
}

TEST(ReferenceTrainer, OneRankClipsAsThePlainFunctionToTheBit) {
  for (const double p : {1.0, 2.0, kInf}) {
    Net net, plain;
    ReferenceTrainer trainer(net->groups(), {});
    trainer.backward(1, loss_of(net));
    loss_of(plain)(0, 0).backward();
    EXPECT_EQ(trainer.clip_grad_norm_(0.03, p),
              optim::clip_grad_norm_(plain->parameters(), 0.03, p).item<double>());
    EXPECT_TRUE(at::equal(net->scale.grad(), plain->scale.grad()));
  }
}

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

TEST(ReferenceTrainerErrors, AreNamed) {
  Net net;
  EXPECT_THAT(error_of([&] { ReferenceTrainer({}, {}); }), HasSubstr("there must be a module"));
  EXPECT_THAT(error_of([&] { ReferenceTrainer(net->groups(), {.world = 0}); }),
              HasSubstr("world is 0"));
  EXPECT_THAT(error_of([&] {
                ReferenceTrainer({net.get(), net->first.get()}, {});
              }),
              HasSubstr("not part of the last one"));
  EXPECT_THAT(error_of([&] {
                ReferenceTrainer trainer(net->groups(), {.world = 2});
                trainer.backward(1, [&](int rank, int microbatch) {
                  return rank == 0 ? loss_of(net)(0, microbatch) : net->scale.sum();
                });
              }),
              HasSubstr("parameter 'first.weight' has a gradient on 1 of 2 ranks"));
  class NoSlotImpl : public nn::Module {
   public:
    NoSlotImpl() { torch::nn::Module::register_parameter("weight", at::zeros({1})); }
  };
  const auto no_slot = std::make_shared<NoSlotImpl>();
  EXPECT_THAT(error_of([&] { ReferenceTrainer({no_slot.get()}, {}); }),
              HasSubstr("'weight' has no slot"));
}

}  // namespace
}  // namespace ppfsdp::train
