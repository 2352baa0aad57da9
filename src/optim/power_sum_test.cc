#include "src/optim/power_sum.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace ppfsdp::optim {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

std::vector<int64_t> words_of(const ExactSum& sum) {
  std::vector<int64_t> words(ExactSum::kWords);
  sum.store(words.data());
  return words;
}

/// One by one, by the definition.
std::vector<int64_t> expected(const at::Tensor& tensor, double p) {
  ExactSum sum;
  const at::Tensor doubles = tensor.to(at::kDouble).contiguous();
  const double* x = doubles.const_data_ptr<double>();
  for (int64_t i = 0; i < doubles.numel(); ++i) {
    const double magnitude = std::abs(x[i]);
    if (p == 2) {
      sum.add_square(magnitude);
    } else if (p == 1) {
      sum.add(magnitude);
    } else {
      sum.add(p == 3 ? magnitude * magnitude * magnitude : std::pow(magnitude, p));
    }
  }
  return words_of(sum);
}

/// Values of either sign whose exponents are spread over `spread` below 2^top, some of them zeros.
at::Tensor spread_values(int64_t n, int top, int spread, double zeros, at::ScalarType dtype,
                         uint64_t seed) {
  std::mt19937_64 random(seed);
  const at::Tensor values = at::empty({n}, at::kDouble);
  for (int64_t i = 0; i < n; ++i) {
    const double fraction = std::ldexp(static_cast<double>(random() >> 11), -53);
    const int exponent = top - static_cast<int>(random() % static_cast<uint64_t>(spread));
    const bool zero = static_cast<double>(random() % 1000) < 1000 * zeros;
    values.mutable_data_ptr<double>()[i] =
        (random() % 2 == 0 ? -1 : 1) * (zero ? 0 : std::ldexp(fraction, exponent));
  }
  return values.to(dtype);
}

// All numbers of levels and both ways past them, each dtype, each width of vectors: a block that is
// taken inexactly, or twice, or left out, or padding that counts, shows in the words.
TEST(PowerSum, IsTheSumOfTheElementsTakenOneByOne) {
  uint64_t seed = 0;
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    for (const double p : {2.0, 1.0, 3.0, 0.5, 2.5, -1.0}) {
      for (const auto& [top, spread] : std::vector<std::pair<int, int>>{
               {-8, 4}, {-8, 25}, {0, 40}, {10, 60}, {-90, 60}, {-100, 240}, {120, 240}}) {
        for (const int64_t n : {0, 1, 511, 1024, 1025, 3000}) {
          for (const double zeros : {0.0, 0.9}) {
            const at::Tensor values = spread_values(n, top, spread, zeros, dtype, ++seed);
            const std::vector<int64_t> wanted = expected(values, p);
            for (const int lanes : {2, 4, 8}) {
              ExactSum sum;
              add_power_sum(values, p, sum, lanes);
              ASSERT_EQ(words_of(sum), wanted)
                  << c10::toString(dtype) << ", p " << p << ", exponents below " << top << " by "
                  << spread << ", " << n << " elements, zeros " << zeros << ", lanes " << lanes;
            }
          }
        }
      }
    }
  }
}

TEST(PowerSum, TakesDoublesOfAllExponents) {
  for (const auto& [top, spread] : std::vector<std::pair<int, int>>{
           {1024, 20},
           {1024, 2000},
           {500, 900},
           {-300, 30},
           {-450, 60},
           {450, 3},
           {-1000, 60},
           // What rounding takes from their squares is below kLeastTop, the squares are not.
           {-380, 10}}) {
    for (const double p : {1.0, 2.0}) {
      const at::Tensor values = spread_values(2000, top, spread, 0.1, at::kDouble, 5);
      for (const int lanes : {2, 8}) {
        ExactSum sum;
        add_power_sum(values, p, sum, lanes);
        EXPECT_EQ(words_of(sum), expected(values, p)) << top << " " << spread << " " << p;
      }
    }
  }
}

// Subnormals are no zeros, and the greatest floats do not overflow.
TEST(PowerSum, TheEndsOfEachFormat) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    const double least = dtype == at::kFloat      ? 0x1p-149
                         : dtype == at::kBFloat16 ? 0x1p-133
                         : dtype == at::kHalf     ? 0x1p-24
                                                  : 0x1p-1074;
    const double most = dtype == at::kHalf ? 65504 : dtype == at::kDouble ? 0x1.8p1023 : 0x1.fep127;
    for (const double p : {1.0, 2.0}) {
      const at::Tensor values = at::zeros({1500}, dtype);
      values[3] = least;
      values[1400] = -least;
      ExactSum small;
      add_power_sum(values, p, small);
      EXPECT_EQ(words_of(small), expected(values, p));
      values[4] = most;
      values[1401] = -most;
      ExactSum both;
      add_power_sum(values, p, both);
      EXPECT_EQ(words_of(both), expected(values, p));
    }
  }
}

TEST(PowerSum, NonFiniteElementsCount) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    for (const double p : {1.0, 2.0, 2.5}) {
      at::Tensor values = at::randn({1100}, at::detail::createCPUGenerator(1)).to(dtype);
      values[1099] = -kInf;
      ExactSum infinite;
      add_power_sum(values, p, infinite);
      EXPECT_EQ(infinite.value(kFloat64), kInf);
      values[5] = kNan;
      ExactSum nan;
      add_power_sum(values, p, nan);
      EXPECT_TRUE(std::isnan(nan.value(kFloat64)));
      EXPECT_EQ(words_of(nan), expected(values, p));
    }
  }
}

TEST(PowerSum, StridesDoNotMatter) {
  const at::Tensor values = at::randn({40, 60}, at::detail::createCPUGenerator(1));
  const at::Tensor part = values.t().slice(0, 3, 50, 2);
  ExactSum sum;
  add_power_sum(part, 2, sum);
  EXPECT_EQ(words_of(sum), expected(part, 2));
}

TEST(PowerSum, ThreadsDoNotMatter) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "OpenMP's own locks are not instrumented, so each looks like a race";
#endif
  const at::Tensor values = at::randn({1 << 20}, at::detail::createCPUGenerator(1));
  const int threads = at::get_num_threads();
  ExactSum one, four;
  at::set_num_threads(1);
  add_power_sum(values, 2, one);
  at::set_num_threads(4);
  add_power_sum(values, 2, four);
  at::set_num_threads(threads);
  EXPECT_EQ(words_of(four), words_of(one));
  EXPECT_NEAR(one.root(kFloat64), 1024, 4);  // of 2^20 squares of variance 2: sigma 0.7
}

TEST(PowerSum, SaysWhatItCannotTake) {
  ExactSum sum;
  EXPECT_THROW(add_power_sum(at::zeros({3}, at::kInt), 2, sum), c10::Error);
  EXPECT_THROW(add_power_sum(at::zeros({3}, at::kMeta), 2, sum), c10::Error);
  EXPECT_THROW(add_power_sum(at::zeros({3}), 0, sum), c10::Error);
  EXPECT_THROW(add_power_sum(at::zeros({3}), kInf, sum), c10::Error);
}

}  // namespace
}  // namespace ppfsdp::optim
