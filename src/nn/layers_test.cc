// Linear, Embedding, RMSNorm, the loss and the initial values, one at a time.
#include <ATen/Context.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <cmath>

#include "src/nn/embedding.h"
#include "src/nn/init.h"
#include "src/nn/linear.h"
#include "src/nn/loss.h"
#include "src/nn/rms_norm.h"

namespace ppfsdp::nn {
namespace {

TEST(Linear, IsTorchsLinearForOneSeed) {
  at::manual_seed(1);
  Linear ours(7, 5);
  at::manual_seed(1);
  torch::nn::Linear theirs(7, 5);
  EXPECT_TRUE(at::equal(ours->weight, theirs->weight));
  EXPECT_TRUE(at::equal(ours->bias, theirs->bias));
  const at::Tensor x = at::randn({2, 3, 7});
  EXPECT_TRUE(at::equal(ours(x), theirs(x)));
}

TEST(Linear, WithoutBiasHasOneParameterAndItsOwnInitializer) {
  Linear linear(3, 2, LinearImpl::Options{.bias = false, .init = ones()});
  ASSERT_EQ(linear->parameters().size(), 1u);
  EXPECT_TRUE(at::equal(linear->weight, at::full({2, 3}, 1.0)));
}

TEST(Linear, TiedWeightIsThatOfTheOtherModuleAndNotResetHere) {
  Embedding table(4, 3);
  Linear linear(table->weight);
  EXPECT_TRUE(linear->weight.is_same(table->weight));
  const at::Tensor before = table->weight.clone();
  linear->reset_parameters();
  EXPECT_TRUE(at::equal(table->weight, before));
}

TEST(Linear, ResetFillsTheEntryEvenWhenTheSlotIsAnother) {
  Linear linear(3, 2, LinearImpl::Options{.bias = false, .init = ones()});
  const at::Tensor entry = at::zeros({2, 3});
  linear->set_registered_parameter("weight", entry);
  linear->weight = at::zeros({2, 3});
  linear->reset_parameters();
  EXPECT_TRUE(at::equal(entry, at::full({2, 3}, 1.0)));
  EXPECT_TRUE(at::equal(linear->weight, at::zeros({2, 3})));
}

TEST(Linear, SizesMustBePositive) { EXPECT_THROW(Linear(0, 2), c10::Error); }

TEST(Embedding, PicksRows) {
  Embedding embedding(4, 3);
  const at::Tensor tokens = at::tensor({3, 0}, at::kLong).view({1, 2});
  const at::Tensor rows = embedding(tokens);
  EXPECT_EQ(rows.sizes(), (std::vector<int64_t>{1, 2, 3}));
  EXPECT_TRUE(at::equal(rows[0][0], embedding->weight[3]));
  EXPECT_THROW(embedding(at::full({1, 1}, 4, at::kLong)), c10::Error);
}

TEST(RMSNorm, NormalisesTheLastDimThenScales) {
  RMSNorm norm(4, 1e-5);
  const at::Tensor x = at::tensor({3.0F, 4.0F, 0.0F, 0.0F}).view({1, 4});
  // Mean square 25 / 4, so the result is x / 2.5.
  EXPECT_TRUE(at::allclose(norm(x), x / 2.5, 1e-5, 0));
  norm->weight.data().fill_(2);
  EXPECT_TRUE(at::allclose(norm(x), x / 1.25, 1e-5, 0));
}

TEST(RMSNorm, ComputesInFloat32AndKeepsTheDtype) {
  // In bfloat16 the mean of squares of 300 would lose what float32 keeps: 300^2 = 90000 has no
  // bfloat16, and 300 / sqrt(90000 + eps) is 1 to float32.
  RMSNorm norm(8, 1e-5, at::kBFloat16);
  const at::Tensor x = at::full({1, 8}, 300.0, at::kBFloat16);
  const at::Tensor y = norm(x);
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(at::equal(y, at::full({1, 8}, 1.0, at::kBFloat16)));
}

TEST(Loss, IsTheMeanOverTokensInFloat32) {
  const at::Tensor logits = at::zeros({1, 2, 4}, at::kBFloat16);
  const at::Tensor labels = at::zeros({1, 2}, at::kLong);
  const at::Tensor loss = next_token_loss(logits, labels);
  EXPECT_EQ(loss.scalar_type(), at::kFloat);
  EXPECT_FLOAT_EQ(loss.item<float>(), std::log(4.0F));
  EXPECT_THROW(next_token_loss(logits, at::zeros({2, 2}, at::kLong)), c10::Error);
}

TEST(TruncNormal, StaysInsideItsBoundsWithTheRightSpread) {
  at::manual_seed(3);
  at::Tensor values = at::empty({100000});
  trunc_normal_(values, 1.0, 2.0, -5.0, 7.0);
  EXPECT_GE(values.min().item<float>(), -5.0F);
  EXPECT_LE(values.max().item<float>(), 7.0F);
  // Cut at 3 deviations a normal keeps 0.98658 of its deviation; the estimate from n values errs by
  // sigma / sqrt(2 n) = 0.0045, the mean by sigma / sqrt(n) = 0.0063: five of these.
  EXPECT_NEAR(values.std().item<double>(), 2.0 * 0.98658, 5 * 0.0045);
  EXPECT_NEAR(values.mean().item<double>(), 1.0, 5 * 0.0063);
}

TEST(TruncNormal, GivesPythonsBits) {
  // torch.manual_seed(11); torch.nn.init.trunc_normal_(torch.empty(4), 0, 0.02, -0.06, 0.06)
  at::manual_seed(11);
  at::Tensor values = at::empty({4});
  trunc_normal_(values, 0.0, 0.02, -0.06, 0.06);
  const at::Tensor expected = at::tensor({-0x1.53a2360000000p-6F, -0x1.608c600000000p-11F,
                                          0x1.60c9ae0000000p-5F, -0x1.3992a20000000p-6F});
  EXPECT_TRUE(at::equal(values, expected)) << values;
}

TEST(TruncNormal, BadArgumentsAreErrors) {
  at::Tensor values = at::empty({1});
  EXPECT_THROW(trunc_normal_(values, 0, 0, -1, 1), c10::Error);
  EXPECT_THROW(trunc_normal_(values, 0, 1, 1, 1), c10::Error);
}

}  // namespace
}  // namespace ppfsdp::nn
