#include "src/optim/exact_sum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace ppfsdp::optim {
namespace {

using Wide = unsigned __int128;

constexpr double kInf = std::numeric_limits<double>::infinity();

/// A natural number times 2^kBase, bit by bit: what ExactSum is measured against.
class Schoolbook {
 public:
  static constexpr int kBase = -2400;

  void add(Wide value, int exponent) {
    size_t at = static_cast<size_t>(exponent - kBase);
    for (; value != 0; value >>= 1, ++at) {
      if ((value & 1) == 0) continue;
      size_t carry = at;
      while (bits_[carry]) bits_[carry++] = false;
      bits_[carry] = true;
    }
  }

  bool operator==(const Schoolbook&) const = default;
  bool operator<(const Schoolbook& other) const {
    return std::lexicographical_compare(bits_.rbegin(), bits_.rend(), other.bits_.rbegin(),
                                        other.bits_.rend());
  }

 private:
  std::vector<bool> bits_ = std::vector<bool>(5000);
};

struct Parts {
  Wide significand;
  int exponent;
};

Parts parts_of(double value) {
  int exponent = 0;
  const double fraction = std::frexp(value, &exponent);
  return {static_cast<Wide>(std::ldexp(fraction, 53)), exponent - 53};
}

Parts sum_of(const Parts& a, const Parts& b) {
  if (a.significand == 0) return b;
  if (b.significand == 0) return a;
  const int exponent = std::min(a.exponent, b.exponent);
  return {(a.significand << (a.exponent - exponent)) + (b.significand << (b.exponent - exponent)),
          exponent};
}

bool is_even(double value, const FloatFormat& format) {
  const uint64_t bits = format.digits == 24 ? std::bit_cast<uint32_t>(static_cast<float>(value))
                                            : std::bit_cast<uint64_t>(value);
  return bits % 2 == 0;
}

double next(double value, double towards, const FloatFormat& format) {
  return format.digits == 24
             ? std::nextafter(static_cast<float>(value), static_cast<float>(towards))
             : std::nextafter(value, towards);
}

/// Whether `rounded` is the nearest value to x, of which `twice` times `factor` (2x) is given, by
/// comparison with the midpoints to its neighbours: of squares, where `squared`.
bool is_nearest(double rounded, const Schoolbook& scaled, bool squared, const FloatFormat& format) {
  const auto doubled_midpoint = [&](double neighbour) {
    const Parts middle = sum_of(parts_of(rounded), parts_of(neighbour));
    Schoolbook result;
    if (squared) {
      result.add(middle.significand * middle.significand, 2 * middle.exponent);
    } else {
      result.add(middle.significand, middle.exponent);
    }
    return result;
  };
  const bool even = is_even(rounded, format);
  const Schoolbook below = doubled_midpoint(rounded == 0 ? 0 : next(rounded, 0, format));
  const Schoolbook above = doubled_midpoint(next(rounded, kInf, format));
  return (below < scaled || (below == scaled && even)) &&
         (scaled < above || (scaled == above && even));
}

/// A float or double of any sign bit pattern but infinities and NaN.
double any_value(std::mt19937_64& random, bool is_float, int spread) {
  // Exponents within `spread` of one another, so that sums have carries and ties.
  const int exponent = static_cast<int>(random() % static_cast<uint64_t>(spread)) - spread / 2;
  const double fraction =
      is_float ? static_cast<double>(random() % (1 << 24)) : static_cast<double>(random() >> 11);
  return std::ldexp(fraction, exponent);
}

// Every rounding of both kinds, against its definition.
TEST(ExactSum, ValueAndRootAreTheNearestToWhatSchoolbookAdditionGives) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 3000; ++round) {
    const bool is_float = random() % 2 == 0;
    const int spread = std::vector<int>{4, 60, 240, is_float ? 240 : 1800}[random() % 4];
    const FloatFormat& format = random() % 2 == 0 ? kFloat32 : kFloat64;
    ExactSum sum, squares;
    Schoolbook twice, four_squares;
    double largest = 0;
    for (uint64_t count = 1 + random() % 9; count > 0; --count) {
      const double value = any_value(random, is_float, spread);
      const Parts parts = parts_of(value);
      sum.add(value);
      twice.add(parts.significand, parts.exponent + 1);
      squares.add_square(value);
      four_squares.add(parts.significand * parts.significand, 2 * parts.exponent + 2);
      largest = std::max(largest, value);
    }
    if (largest > std::ldexp(1.0, format.highest - 6)) continue;  // may overflow: see below
    EXPECT_TRUE(is_nearest(sum.value(format), twice, false, format)) << round;
    EXPECT_TRUE(is_nearest(squares.root(format), four_squares, true, format)) << round;
  }
}

TEST(ExactSum, TiesGoToEvenAndTheLeastBitBreaksThem) {
  ExactSum sum;
  sum.add(0x1p24);
  sum.add(1.0);
  EXPECT_EQ(sum.value(kFloat32), 0x1p24);
  sum.add(2.0);
  EXPECT_EQ(sum.value(kFloat32), 0x1p24 + 4);
  sum.add(-2.0);
  sum.add_square(0x1p-1074);
  EXPECT_EQ(sum.value(kFloat32), 0x1p24 + 2);
  // The root of 2^48 (1 + 2^-24)^2 is half-way between two floats.
  ExactSum square;
  square.add_square(0x1p24 + 1);
  EXPECT_EQ(square.root(kFloat32), 0x1p24);
  EXPECT_EQ(square.root(kFloat64), 0x1p24 + 1);
  square.add_square(0x1p-1074);
  EXPECT_EQ(square.root(kFloat32), 0x1p24 + 2);
}

TEST(ExactSum, SubnormalResultsAndOverflow) {
  ExactSum least;
  least.add_square(0x1p-149);
  EXPECT_EQ(least.root(kFloat32), 0x1p-149);
  EXPECT_EQ(least.value(kFloat32), 0);  // 2^-298
  ExactSum half;
  half.add(0x1p-150);
  EXPECT_EQ(half.value(kFloat32), 0);  // a tie, and 0 is even
  half.add(0x1p-1074);
  EXPECT_EQ(half.value(kFloat32), 0x1p-149);
  ExactSum doubles;
  doubles.add_square(0x1p-1074);
  EXPECT_EQ(doubles.root(kFloat64), 0x1p-1074);
  const float most = std::numeric_limits<float>::max();
  ExactSum large;
  large.add(most);
  EXPECT_EQ(large.value(kFloat32), most);
  large.add(0x1p102);  // less than half a unit beyond the greatest
  EXPECT_EQ(large.value(kFloat32), most);
  large.add(0x1p102);  // half a unit: as IEEE rounds, infinite
  EXPECT_EQ(large.value(kFloat32), kInf);
  EXPECT_EQ(large.value(kFloat64), double{most} + 0x1p103);
  ExactSum doubles_most;
  for (int i = 0; i < 4; ++i) doubles_most.add_square(std::numeric_limits<double>::max());
  EXPECT_EQ(doubles_most.value(kFloat64), kInf);
  EXPECT_EQ(doubles_most.root(kFloat64), kInf);
  EXPECT_EQ(ExactSum().value(kFloat32), 0);
  EXPECT_EQ(ExactSum().root(kFloat64), 0);
}

TEST(ExactSum, WhatCancelsLeavesTheRest) {
  ExactSum sum;
  sum.add(1e308);
  sum.add(1e-300);
  sum.add(-1e308);
  EXPECT_EQ(sum.value(kFloat64), 1e-300);
}

// A carry that is forgotten, or moved too late, shows in the words of a sum of many.
TEST(ExactSum, ManyAdditionsCarry) {
  std::mt19937_64 random(2);
  ExactSum sum;
  Schoolbook twice;
  for (int i = 0; i < 100; ++i) {
    const double value = any_value(random, false, 300);
    sum.add(value);
    const Parts parts = parts_of(value);
    twice.add(parts.significand, parts.exponent + 1);
  }
  const double once = sum.value(kFloat64);
  EXPECT_TRUE(is_nearest(once, twice, false, kFloat64));
  for (int i = 0; i < 60; ++i) sum.add(ExactSum(sum));
  EXPECT_EQ(sum.value(kFloat64), std::ldexp(once, 60));
  ExactSum counted;
  for (int64_t i = 0; i < (int64_t{1} << 29) + 5; ++i) counted.add(int64_t{-1}, -30);
  counted.add(1.0);
  counted.add(0x1p-30 * 5);
  EXPECT_EQ(counted.value(kFloat64), 0.5);
}

TEST(ExactSum, WordsOfPartsAddUpToThoseOfTheWhole) {
  std::mt19937_64 random(3);
  std::vector<double> values(1000);
  for (double& value : values) value = any_value(random, false, 1900);
  ExactSum whole;
  for (const double value : values) whole.add_square(value);
  std::vector<int64_t> wanted(ExactSum::kWords);
  whole.store(wanted.data());
  for (const int ranks : {1, 3, 16}) {
    std::vector<ExactSum> parts(ranks);
    std::ranges::shuffle(values, random);
    for (size_t i = 0; i < values.size(); ++i) parts[i % ranks].add_square(values[i]);
    std::vector<int64_t> total(ExactSum::kWords), words(ExactSum::kWords);
    for (const ExactSum& part : parts) {
      part.store(words.data());
      for (int k = 0; k < ExactSum::kWords; ++k) total[k] += words[k];
    }
    ExactSum::load(total.data()).store(words.data());
    EXPECT_EQ(words, wanted) << ranks;
  }
}

TEST(ExactSum, NonFiniteValuesAreCountedInTheWords) {
  ExactSum sum, other;
  sum.add(1.0);
  other.add_square(-kInf);
  std::vector<int64_t> words(ExactSum::kWords);
  other.store(words.data());
  sum.add(ExactSum::load(words.data()));
  EXPECT_EQ(sum.value(kFloat32), kInf);
  EXPECT_EQ(sum.root(kFloat64), kInf);
  other.add_square(std::numeric_limits<double>::quiet_NaN());
  sum.add(other);
  EXPECT_TRUE(std::isnan(sum.value(kFloat32)));
  EXPECT_TRUE(std::isnan(sum.root(kFloat32)));
}

}  // namespace
}  // namespace ppfsdp::optim
