#include "golden/compare.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace ppfsdp::golden {
namespace {

using ::testing::HasSubstr;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Outputs outputs() {
  Outputs result;
  result.steps = {{.loss = 2, .loss_per_rank = {1, 3}, .grad_norm = 4}};
  result.grads[0]["w"] = at::full({3}, 0.5);
  result.final["w"] = at::full({3}, 8.0);
  return result;
}

TEST(Compare, EqualRunsAreEqual) {
  const Difference difference = compare(outputs(), outputs());
  EXPECT_TRUE(difference.bitwise);
  EXPECT_EQ(difference.first, "");
  EXPECT_EQ(difference.grad_scale, 0.5);
  EXPECT_EQ(difference.param_rms, 0);
}

TEST(Compare, EachKindOfDifferenceIsMeasured) {
  Outputs run = outputs();
  run.steps[0].loss_per_rank[1] = 3.3;
  Difference difference = compare(run, outputs());
  EXPECT_FALSE(difference.bitwise);
  EXPECT_NEAR(difference.loss_rel, 0.1, 1e-15);
  EXPECT_THAT(difference.first, HasSubstr("step 0, rank 1: loss: 3.3 instead of 3"));

  run = outputs();
  run.steps[0].grad_norm = 5;
  difference = compare(run, outputs());
  EXPECT_EQ(difference.grad_norm_rel, 0.25);
  EXPECT_THAT(difference.first, HasSubstr("step 0: gradient norm"));

  run = outputs();
  run.grads[0]["w"][2] = 0.75;
  difference = compare(run, outputs());
  EXPECT_EQ(difference.grad_abs, 0.25);
  EXPECT_THAT(difference.first, HasSubstr("gradient of 'w': element 2 is 0.75 instead of 0.5"));

  run = outputs();
  run.final["w"][1] = 5;
  difference = compare(run, outputs());
  EXPECT_EQ(difference.param_abs, 3);
  EXPECT_DOUBLE_EQ(difference.param_rms, std::sqrt(9.0 / 3));
  EXPECT_THAT(difference.first, HasSubstr("parameter 'w': element 1 is 5 instead of 8"));
}

TEST(Compare, OneBitIsADifference) {
  Outputs run = outputs();
  run.final["w"][0] = std::nextafter(8.0F, 9.0F);
  EXPECT_FALSE(compare(run, outputs()).bitwise);
  run = outputs();
  Outputs recorded = outputs();
  run.final["w"] = at::zeros({3});
  recorded.final["w"] = -at::zeros({3});
  const Difference difference = compare(run, recorded);
  EXPECT_FALSE(difference.bitwise);
  EXPECT_EQ(difference.param_abs, 0);
}

TEST(Compare, NanAgainstANumberIsInfinitelyFar) {
  Outputs run = outputs();
  run.final["w"][0] = NAN;
  run.steps[0].loss = NAN;
  const Difference difference = compare(run, outputs());
  EXPECT_EQ(difference.param_abs, kInfinity);
  EXPECT_EQ(difference.loss_rel, kInfinity);
  EXPECT_FALSE(within(difference, tolerance(Case(), difference)));
  // A recorded NaN that is repeated is equal.
  EXPECT_TRUE(compare(run, run).bitwise);
}

TEST(Compare, WhatIsMissingIsAnError) {
  Outputs run = outputs();
  run.final.clear();
  EXPECT_THROW(compare(run, outputs()), c10::Error);
  run = outputs();
  run.steps.clear();
  EXPECT_THROW(compare(run, outputs()), c10::Error);
  run = outputs();
  run.grads[0]["w"] = at::zeros({4});
  EXPECT_THROW(compare(run, outputs()), c10::Error);
  run = outputs();
  run.grads.clear();
  EXPECT_THROW(compare(run, outputs()), c10::Error);
}

TEST(Tolerance, FollowsItsDerivation) {
  // dim 32, hidden 86, vocab 128, 2 * 16 tokens: n = 128; 2 blocks: d = 2 (18 + 2) = 40; 2 ranks.
  const Difference none;
  const double u = 0x1p-24, v = 0x1p-8;
  Case config;
  EXPECT_DOUBLE_EQ(tolerance(config, none).loss_rel,
                   8 * 5 * 4 * (std::sqrt(40.0 * 128) * u + std::sqrt(2.0) * u));
  config.reduce_dtype = at::kBFloat16;
  EXPECT_DOUBLE_EQ(tolerance(config, none).loss_rel,
                   8 * 5 * 4 * (std::sqrt(40.0 * 128) * u + std::sqrt(2.0) * v));
  config.param_dtype = at::kBFloat16;
  config.reduce_dtype = at::kFloat;
  EXPECT_DOUBLE_EQ(
      tolerance(config, none).loss_rel,
      8 * 5 * 4 * (2 * std::sqrt(40.0 * std::sqrt(128.0) * u * v) + std::sqrt(2.0) * u));
}

TEST(Tolerance, IsBelowWhatAFaultDoes) {
  // A step of AdamW moves by lr: a run that differs by a tenth of that is no matter of rounding.
  const Tolerance fp32 = tolerance(Case(), Difference());
  EXPECT_LT(fp32.loss_rel, 1e-3);
  EXPECT_LT(fp32.param_rms, 0.1 * Case().lr * 5);
}

}  // namespace
}  // namespace ppfsdp::golden
