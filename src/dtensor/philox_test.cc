#include "src/dtensor/philox.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <limits>

namespace ppfsdp::dtensor {
namespace {

// The three known answers for philox4x32 with 10 rounds that Random123 publishes (its file
// tests/kat_vectors): counter and key all zeros, all ones, and the first digits of pi.
TEST(Philox, KnownAnswers) {
  EXPECT_EQ(philox4x32_10({0, 0, 0, 0}, {0, 0}),
            (PhiloxCounter{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(
      philox4x32_10({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
      (PhiloxCounter{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(
      philox4x32_10({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
      (PhiloxCounter{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

// A half swapped, or lost, would make tensors of more than 2^32 elements repeat.
TEST(Philox, HalvesOf64BitsLowWordFirst) {
  EXPECT_EQ(philox_counter(0x85a308d3243f6a88, 0x0370734413198a2e),
            (PhiloxCounter{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}));
  EXPECT_EQ(philox_key(0x299f31d0a4093822), (PhiloxKey{0xa4093822, 0x299f31d0}));
}

TEST(Philox, RangeOfRandomWithoutBounds) {
  EXPECT_EQ(random_range(c10::ScalarType::Bool), 2U);
  EXPECT_EQ(random_range(c10::ScalarType::Byte), 256U);
  EXPECT_EQ(random_range(c10::ScalarType::Char), 128U);
  EXPECT_EQ(random_range(c10::ScalarType::Short), 32768U);
  EXPECT_EQ(random_range(c10::ScalarType::Int), 2147483648U);
  EXPECT_EQ(random_range(c10::ScalarType::Long), 9223372036854775808U);
  EXPECT_EQ(random_range(c10::ScalarType::BFloat16), 257U);
  EXPECT_EQ(random_range(c10::ScalarType::Half), 2049U);
  EXPECT_EQ(random_range(c10::ScalarType::Float), 16777217U);
  EXPECT_EQ(random_range(c10::ScalarType::Double), 9007199254740993U);
  EXPECT_THROW(random_range(c10::ScalarType::ComplexFloat), c10::Error);
}

// Each of these would otherwise fill a tensor with NaN, or with values of another distribution.
TEST(Philox, DistributionsThatAreNone) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const auto check = [](const Distribution& distribution,
                        c10::ScalarType dtype = c10::ScalarType::Float) {
    check_distribution("test", distribution, dtype);
  };
  EXPECT_NO_THROW(check(Uniform{1, 1}));
  EXPECT_THROW(check(Uniform{1, 0.5}), c10::Error);
  EXPECT_THROW(check(Uniform{kNan, 1}), c10::Error);
  EXPECT_THROW(check(Uniform{0, kInf}), c10::Error);
  EXPECT_NO_THROW(check(Normal{0, 0}));
  EXPECT_THROW(check(Normal{0, -1}), c10::Error);
  EXPECT_THROW(check(Normal{0, kNan}), c10::Error);
  EXPECT_THROW(check(Normal{kNan, 1}), c10::Error);
  EXPECT_NO_THROW(check(Bernoulli{0}));
  EXPECT_NO_THROW(check(Bernoulli{1}, c10::ScalarType::Bool));
  EXPECT_THROW(check(Bernoulli{1.5}), c10::Error);
  EXPECT_THROW(check(Bernoulli{kNan}), c10::Error);
  EXPECT_THROW(check(Exponential{0}), c10::Error);
  EXPECT_NO_THROW(check(RandomInt{0, 5}, c10::ScalarType::Long));
  EXPECT_THROW(check(Uniform{}, c10::ScalarType::Long), c10::Error);
  EXPECT_THROW(check(Normal{}, c10::ScalarType::Bool), c10::Error);
  EXPECT_THROW(check(Random{}, c10::ScalarType::ComplexFloat), c10::Error);
}

TEST(Philox, ErrorsNameTheDistributionAndTheDtype) {
  try {
    check_distribution("normal_", Normal{1, -2}, c10::ScalarType::Float);
    FAIL() << "std = -2 was taken";
  } catch (const c10::Error& error) {
    EXPECT_STREQ(error.what_without_backtrace(),
                 "normal_: normal(1, -2) needs std >= 0 and a mean");
  }
  try {
    check_distribution("uniform_", Uniform{}, c10::ScalarType::Long);
    FAIL() << "uniform integers were taken";
  } catch (const c10::Error& error) {
    EXPECT_STREQ(error.what_without_backtrace(),
                 "uniform_: a tensor of Long cannot hold draws from uniform(0, 1); use Float, "
                 "Double, Half or BFloat16");
  }
}

}  // namespace
}  // namespace ppfsdp::dtensor
