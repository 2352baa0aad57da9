#include "backends/nccl/types.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <cstring>

namespace ppfsdp::nccl {
namespace {

// A wrong type reduces other bits than the tensor's, without any error.
TEST(Types, EveryReducibleDtypeHasItsOwn) {
  EXPECT_EQ(reduced_as(at::kByte), ncclUint8);
  EXPECT_EQ(reduced_as(at::kChar), ncclInt8);
  EXPECT_EQ(reduced_as(at::kInt), ncclInt32);
  EXPECT_EQ(reduced_as(at::kLong), ncclInt64);
  EXPECT_EQ(reduced_as(at::kHalf), ncclFloat16);
  EXPECT_EQ(reduced_as(at::kBFloat16), ncclBfloat16);
  EXPECT_EQ(reduced_as(at::kFloat), ncclFloat32);
  EXPECT_EQ(reduced_as(at::kDouble), ncclFloat64);
}

TEST(Types, WhatNcclLacksHasNone) {
  EXPECT_FALSE(reduced_as(at::kShort).has_value());
  EXPECT_FALSE(reduced_as(at::kBool).has_value());
  EXPECT_FALSE(reduced_as(at::kComplexFloat).has_value());
}

TEST(Types, ReductionsAreNotMixedUp) {
  using Kind = comm::ReduceOp::Kind;
  EXPECT_EQ(builtin_op(Kind::kSum), ncclSum);
  EXPECT_EQ(builtin_op(Kind::kAvg), ncclAvg);
  EXPECT_EQ(builtin_op(Kind::kMin), ncclMin);
  EXPECT_EQ(builtin_op(Kind::kMax), ncclMax);
}

template <typename T>
T value_of(const Scalar& scalar) {
  T value;
  std::memcpy(&value, scalar.bytes.data(), sizeof(value));
  return value;
}

// NCCL reads as many bytes as the dtype has: a double read as a half is 0 or garbage.
TEST(Types, AFactorIsInTheTensorsDtype) {
  EXPECT_EQ(value_of<float>(scalar_of(0.3, at::kFloat)), 0.3f);
  EXPECT_EQ(value_of<double>(scalar_of(0.3, at::kDouble)), 0.3);
  EXPECT_EQ(value_of<c10::Half>(scalar_of(0.3, at::kHalf)).x, c10::Half(0.3f).x);
  EXPECT_EQ(value_of<c10::BFloat16>(scalar_of(0.3, at::kBFloat16)).x, c10::BFloat16(0.3f).x);
}

}  // namespace
}  // namespace ppfsdp::nccl
