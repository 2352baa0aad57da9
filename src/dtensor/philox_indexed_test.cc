// "By hand" means: from Random123's published answer for zeros, 6627e8d5 e169c58d bc57ac4c
// 9b00dbd8, or from a Philox of a few lines of Python that gives it too, with Python's integers,
// fractions and math functions for the rest.
#include "src/dtensor/philox_indexed.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <vector>

namespace ppfsdp::dtensor {
namespace {

using c10::ScalarType;

at::Tensor run(const Distribution& distribution, ScalarType dtype, int64_t first, int64_t count,
               uint64_t seed = 0, uint64_t draw = 0) {
  at::Tensor out = at::empty({count}, dtype);
  fill_indexed_run(out, first, distribution, seed, draw);
  return out;
}

template <typename T>
std::vector<T> values(const at::Tensor& tensor) {
  const at::Tensor typed = tensor.to(c10::CppTypeToScalarType<T>::value);
  return {typed.data_ptr<T>(), typed.data_ptr<T>() + typed.numel()};
}

TEST(FillIndexed, UniformByHand) {
  EXPECT_EQ(values<float>(run(Uniform{}, ScalarType::Float, 0, 4)),
            (std::vector<float>{0x1.989fap-2F, 0x1.c2d38ap-1F, 0x1.78af58p-1F, 0x1.3601b6p-1F}));
  EXPECT_EQ(values<double>(run(Uniform{}, ScalarType::Double, 0, 2)),
            (std::vector<double>{0x1.989fa35785a7p-2, 0x1.78af58993601bp-1}));
}

// By hand: sqrt(-2 ln(1 - u)) times cosine and sine of 2 pi v. 1e-15 is a few ulps of Python's own.
TEST(FillIndexed, NormalByHand) {
  const std::vector<float> expected = {0.7379258618673693F, -0.6884335564642547F,
                                       -1.2860188831756638F, -1.0037893655271375F};
  EXPECT_EQ(values<float>(run(Normal{}, ScalarType::Float, 0, 4)), expected);
  const std::vector<float> scaled = values<float>(run(Normal{3, 0.5}, ScalarType::Float, 0, 4));
  EXPECT_EQ(scaled[0], static_cast<float>(3 + 0.5 * 0.7379258618673693));
}

TEST(FillIndexed, BernoulliByHand) {
  // 0x6627e8d5 / 2^32 = 0.399046..., as 32 bits say it exactly.
  const double word = 0x6627e8d5p-32;
  EXPECT_EQ(run(Bernoulli{word}, ScalarType::Float, 0, 1).item<float>(), 0);
  EXPECT_EQ(run(Bernoulli{word + 0x1p-40}, ScalarType::Bool, 0, 1).item<bool>(), true);
  EXPECT_EQ(values<float>(run(Bernoulli{0.7}, ScalarType::Float, 0, 4)),
            (std::vector<float>{1, 0, 0, 1}));
}

// Every word of key and counter set: the digits of pi as seed and draw, and an index beyond 2^60.
TEST(FillIndexed, EveryBitOfSeedDrawAndIndexCounts) {
  constexpr uint64_t kSeed = 0x299f31d0a4093822;
  constexpr uint64_t kDraw = 0x0370734413198a2e;
  constexpr int64_t kIndex = 1624712377330936353;  // 4 * 0x05a308d3243f6a88 + 1
  const auto one = [](const Distribution& distribution, ScalarType dtype, int64_t index) {
    return run(distribution, dtype, index, 1, kSeed, kDraw).item<double>();
  };
  EXPECT_EQ(one(Uniform{}, ScalarType::Float, kIndex), 0x1.5ca8bcp-2);
  EXPECT_EQ(one(Normal{}, ScalarType::Float, kIndex - 1), -0.3464779052889233F);
  EXPECT_EQ(one(Normal{}, ScalarType::Float, kIndex), 0.5422836712948683F);
  constexpr int64_t kWide = 812356188665468177;  // 2 * 0x05a308d3243f6a88 + 1
  EXPECT_EQ(one(RandomInt{100, 1000}, ScalarType::Long, kWide), 577);
  EXPECT_EQ(run(RandomInt{}, ScalarType::Long, kWide, 1, kSeed, kDraw).item<int64_t>(),
            3425117514417693477);
  EXPECT_NEAR(one(Normal{}, ScalarType::Double, kWide - 1), 0.253061995904247, 1e-15);
  EXPECT_NEAR(one(Normal{}, ScalarType::Double, kWide), 0.5916740195668785, 1e-15);
}

// The logarithm, sine and cosine of this mode beside libm's, on 200000 pairs. Both are within an
// ulp or two, the radius is below 8.6 (sqrt(-2 ln 2^-53)), so 8.6 * 4 * 2^-53 < 4e-15 bounds the
// difference; in relative terms only where sine or cosine vanish does it grow.
TEST(FillIndexed, NormalsAreBoxMullersOfTheWords) {
  constexpr int64_t kCount = 400000;
  const std::vector<double> normals =
      values<double>(run(Normal{}, ScalarType::Double, 0, kCount, 5));
  for (int64_t i = 0; i < kCount; i += 2) {
    const PhiloxCounter words = philox4x32_10(philox_counter(i / 2, 0), philox_key(5));
    const double u =
        std::ldexp(static_cast<double>((uint64_t{words[0]} << 32 | words[1]) >> 11), -53);
    const double v =
        std::ldexp(static_cast<double>((uint64_t{words[2]} << 32 | words[3]) >> 11), -53);
    const double radius = std::sqrt(-2 * std::log1p(-u));
    ASSERT_NEAR(normals[i], radius * std::cos(2 * M_PI * v), 4e-15) << "of element " << i;
    ASSERT_NEAR(normals[i + 1], radius * std::sin(2 * M_PI * v), 4e-15) << "of element " << i;
  }
}

// A million values: the mean of N(0, 1) has standard deviation 1e-3, its mean square sqrt(2) *
// 1e-3, the share of Bernoulli(0.3) 4.6e-4, the mean of uniform [0, 1) 2.9e-4. Five of each.
TEST(FillIndexed, Moments) {
  constexpr int64_t kCount = 1000000;
  const at::Tensor normal = run(Normal{}, ScalarType::Float, 0, kCount, 1).to(at::kDouble);
  EXPECT_NEAR(normal.mean().item<double>(), 0, 5e-3);
  EXPECT_NEAR(normal.square().mean().item<double>(), 1, 7.1e-3);
  EXPECT_NEAR(normal.mul(normal.roll(1)).mean().item<double>(), 0, 5e-3);
  EXPECT_NEAR(run(Bernoulli{0.3}, ScalarType::Double, 0, kCount, 1).mean().item<double>(), 0.3,
              2.3e-3);
  const at::Tensor uniform = run(Uniform{}, ScalarType::Float, 0, kCount, 1).to(at::kDouble);
  EXPECT_NEAR(uniform.mean().item<double>(), 0.5, 1.5e-3);
  EXPECT_NEAR(run(Exponential{2}, ScalarType::Double, 0, kCount, 1).mean().item<double>(), 0.5,
              2.5e-3);
  EXPECT_GE(run(Exponential{}, ScalarType::Double, 0, kCount, 1).min().item<double>(), 0);
}

// [from, to): rounding to the dtype must not reach `to`. In bfloat16 one value in 512 would.
TEST(FillIndexed, UniformNeverReachesTo) {
  for (const ScalarType dtype : {ScalarType::BFloat16, ScalarType::Half, ScalarType::Float}) {
    const at::Tensor drawn = run(Uniform{1, 2}, dtype, 0, 1 << 20, 3).to(at::kDouble);
    EXPECT_LT(drawn.max().item<double>(), 2) << dtype;
    EXPECT_GE(drawn.min().item<double>(), 1) << dtype;
  }
  EXPECT_EQ(run(Uniform{2, 2}, ScalarType::Float, 0, 1).item<float>(), 2);
}

TEST(FillIndexed, NarrowDtypesAreTheFloatsRounded) {
  for (const ScalarType dtype : {ScalarType::BFloat16, ScalarType::Half}) {
    EXPECT_TRUE(at::equal(run(Normal{1, 2}, ScalarType::Float, 7, 1000, 9, 2).to(dtype),
                          run(Normal{1, 2}, dtype, 7, 1000, 9, 2)));
  }
}

TEST(FillIndexed, OtherSeedsAndDrawsHaveOtherValues) {
  const at::Tensor base = run(Uniform{}, ScalarType::Float, 0, 100, 1, 1);
  EXPECT_FALSE(at::equal(base, run(Uniform{}, ScalarType::Float, 0, 100, 2, 1)));
  EXPECT_FALSE(at::equal(base, run(Uniform{}, ScalarType::Float, 0, 100, 1, 2)));
  EXPECT_TRUE(at::equal(base, run(Uniform{}, ScalarType::Float, 0, 100, 1, 1)));
}

// A run that begins or ends inside of a block, or of a batch of blocks, is the whole's part.
TEST(FillIndexed, RunsAtEveryAlignment) {
  for (const auto& [distribution, dtype] :
       std::vector<std::pair<Distribution, ScalarType>>{{Uniform{-1, 1}, ScalarType::Float},
                                                        {Normal{}, ScalarType::Float},
                                                        {Normal{}, ScalarType::Double},
                                                        {RandomInt{-3, 9}, ScalarType::Int},
                                                        {Bernoulli{0.5}, ScalarType::Bool}}) {
    const at::Tensor whole = run(distribution, dtype, 0, 600, 4);
    for (const int64_t first : {0, 1, 2, 3, 5, 255, 256, 257}) {
      for (const int64_t count : {0, 1, 2, 3, 4, 7, 255, 256, 257, 300}) {
        ASSERT_TRUE(at::equal(run(distribution, dtype, first, count, 4),
                              whole.slice(0, first, first + count)))
            << to_string(distribution) << " from " << first << ", " << count << " of them";
      }
    }
  }
}

// Any box of a tensor is that part of the whole: Shard of any dim, nested shards, whole and empty
// parts; into a contiguous and into a strided local tensor.
TEST(FillIndexed, EveryBoxIsTheWholesPart) {
  const std::vector<int64_t> sizes = {4, 3, 5};
  for (const ScalarType dtype : {ScalarType::Float, ScalarType::Double}) {
    const at::Tensor whole = run(Normal{}, dtype, 0, 60, 8, 3).view(sizes);
    const auto check = [&](const std::array<ShardRange, 3>& box) {
      at::Tensor expected = whole;
      std::vector<int64_t> local_sizes;
      for (size_t d = 0; d < 3; ++d) {
        expected = expected.narrow(static_cast<int64_t>(d), box[d].offset, box[d].length);
        local_sizes.push_back(box[d].length);
      }
      const at::Tensor local = at::empty(local_sizes, dtype);
      fill_indexed(local, sizes, box, Normal{}, 8, 3);
      EXPECT_TRUE(at::equal(local, expected));
      const at::Tensor strided =
          at::empty({local_sizes[2], local_sizes[1], local_sizes[0]}, dtype).permute({2, 1, 0});
      fill_indexed(strided, sizes, box, Normal{}, 8, 3);
      EXPECT_TRUE(at::equal(strided, expected));
    };
    for (int64_t a = 0; a <= 4; ++a) {
      for (int64_t b = 0; b <= 3; ++b) {
        for (int64_t c = 0; c <= 5; ++c) {
          check({ShardRange{4 - a, a}, {3 - b, b}, {5 - c, c}});
          check({ShardRange{0, a}, {0, b}, {0, c}});
        }
      }
    }
  }
}

TEST(FillIndexed, AScalarIsElementZero) {
  const at::Tensor scalar = at::empty({}, at::kFloat);
  fill_indexed(scalar, {}, {}, Uniform{}, 0, 0);
  EXPECT_EQ(scalar.item<float>(), 0x1.989fap-2F);
}

TEST(FillIndexed, MetaTensorsAreLeftAlone) {
  const at::Tensor meta = at::empty({1 << 20, 1 << 20}, at::TensorOptions().device(at::kMeta));
  const std::array<ShardRange, 2> ranges = {ShardRange{0, 1 << 20}, {0, 1 << 20}};
  EXPECT_NO_THROW(fill_indexed(meta, meta.sizes(), ranges, Uniform{}, 0, 0));
}

TEST(FillIndexed, BadInput) {
  const at::Tensor local = at::empty({2, 3}, at::kFloat);
  const std::vector<ShardRange> ranges = {{2, 2}, {0, 3}};
  EXPECT_NO_THROW(fill_indexed(local, {4, 3}, ranges, Uniform{}, 0, 0));
  EXPECT_THROW(fill_indexed(local, {3, 3}, ranges, Uniform{}, 0, 0), c10::Error);  // 2 + 2 > 3
  EXPECT_THROW(fill_indexed(local, {4, 3, 1}, ranges, Uniform{}, 0, 0), c10::Error);
  EXPECT_THROW(fill_indexed(local, {4, 3}, {{0, 1}, {0, 3}}, Uniform{}, 0, 0), c10::Error);
  EXPECT_THROW(fill_indexed(local, {4, 3}, ranges, Uniform{1, 0}, 0, 0), c10::Error);
  EXPECT_THROW(fill_indexed_run(local.t(), 0, Uniform{}, 0, 0), c10::Error);
  EXPECT_THROW(fill_indexed_run(local, -1, Uniform{}, 0, 0), c10::Error);
}

}  // namespace
}  // namespace ppfsdp::dtensor
