// What ATen draws on a GPU, from the published answers of Philox and the written rules. "By hand"
// means: with integers and exact fractions of Python, each rounding of the rule done explicitly.
#include "src/dtensor/philox_cuda.h"

#include <ATen/TensorIterator.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <vector>

namespace ppfsdp::dtensor {
namespace {

using c10::ScalarType;

// One multiprocessor of 256 threads: 256 threads at most, so that the four values of one draw are
// elements t, t + 256, t + 512 and t + 768 of a round of 1024.
constexpr PhiloxGrid kTiny = {.multiprocessors = 1, .threads_per_multiprocessor = 256};
// An H100 or H200 SXM: 132 * (2048 / 256) = 1056 blocks, 270336 threads.
constexpr PhiloxGrid kHopper = {.multiprocessors = 132, .threads_per_multiprocessor = 2048};

// Seed and offset 0, thread 0: Random123's answer for counter and key of zeros, which is
// 6627e8d5 e169c58d bc57ac4c 9b00dbd8, lies at these elements.
constexpr PhiloxState kZeros = {};
constexpr std::array<int64_t, 4> kLanes = {0, 256, 512, 768};

template <typename T>
T value(const Distribution& distribution, ScalarType dtype, int64_t element,
        PhiloxState state = kZeros, int64_t numel = 1024, PhiloxGrid grid = kTiny) {
  return philox_cuda_values(distribution, dtype, numel, state, grid, element, 1).item<T>();
}

template <typename T>
std::vector<T> lane_values(const Distribution& distribution, ScalarType dtype, int lanes) {
  std::vector<T> values;
  for (int lane = 0; lane < lanes; ++lane) {
    values.push_back(value<T>(distribution, dtype, kLanes[lane]));
  }
  return values;
}

// By hand: float(word) 2^-32 + 2^-33, rounded to 24 bits after each step.
TEST(PhiloxCudaValues, UniformFloat) {
  EXPECT_EQ(lane_values<float>(Uniform{}, ScalarType::Float, 4),
            (std::vector<float>{0x1.989fa4p-2F, 0x1.c2d38cp-1F, 0x1.78af58p-1F, 0x1.3601b8p-1F}));
}

// By hand with a fused multiply-add; without it the last two would be 0x1.153602p-1 and
// 0x1.da6874p-2. That nvcc fuses it was seen in the PTX it makes of uniform_kernel.
TEST(PhiloxCudaValues, UniformBoundsByOneFusedMultiplyAdd) {
  EXPECT_EQ(lane_values<float>(Uniform{0.1, 0.7}, ScalarType::Float, 4),
            (std::vector<float>{0x1.5b92fcp-2F, 0x1.41b220p-1F, 0x1.153600p-1F, 0x1.da6876p-2F}));
}

// By hand: 0.1 and 0.7 are 0.10009765625 and 0.69921875 in bfloat16, and their difference is
// rounded to 0.59765625 before it is used.
TEST(PhiloxCudaValues, UniformBFloat16RoundsTheBoundsAndTheRange) {
  EXPECT_EQ(lane_values<float>(Uniform{0.1, 0.7}, ScalarType::BFloat16, 4),
            (std::vector<float>{0.337890625F, 0.625F, 0.5390625F, 0.462890625F}));
}

// By hand: z = x ^ (y << 21) of 53 bits, z 2^-53 + 2^-54; two values a draw.
TEST(PhiloxCudaValues, UniformDoubleTakesTwoWords) {
  EXPECT_EQ(lane_values<double>(Uniform{}, ScalarType::Double, 2),
            (std::vector<double>{0x1.c2d38d787e8d6p-1, 0x1.3601bc757ac4cp-1}));
  EXPECT_EQ(lane_values<double>(Uniform{-2, 3}, ScalarType::Double, 2),
            (std::vector<double>{0x1.338870d69e30cp+1, 0x1.07045725b2ebep+0}));
}

// curand's interval is (0, 1]; a value that comes out as `to` must become `from`. The first word of
// 0xffffff80 or more, which rounds to 1, was searched for: the fourth of thread 10475606.
TEST(PhiloxCudaValues, UniformThatReachesToBecomesFrom) {
  constexpr PhiloxGrid kWide = {.multiprocessors = 41000, .threads_per_multiprocessor = 256};
  constexpr int64_t kThreads = 41000 * 256;
  EXPECT_EQ(value<float>(Uniform{2, 3}, ScalarType::Float, 3 * kThreads + 10475606, kZeros,
                         4 * kThreads, kWide),
            2);
  // Thread 146's first word, 0xffaa1358, is below 1 as a float and rounds to 1 as a bfloat16.
  EXPECT_EQ(value<float>(Uniform{}, ScalarType::Float, 146), 0x1.ff5426p-1F);
  EXPECT_EQ(value<float>(Uniform{}, ScalarType::BFloat16, 146), 0);
}

// By hand: 10 + word % 7.
TEST(PhiloxCudaValues, RandomIntOfOneWord) {
  EXPECT_EQ(lane_values<int64_t>(RandomInt{10, 7}, ScalarType::Long, 4),
            (std::vector<int64_t>{15, 16, 16, 11}));
  EXPECT_EQ(lane_values<float>(RandomInt{10, 7}, ScalarType::BFloat16, 4),
            (std::vector<float>{15, 16, 16, 11}));
}

// By hand: from 2^28 values on two words, the first the high half: -5 + 0x6627e8d5e169c58d % range.
TEST(PhiloxCudaValues, RandomIntOfTwoWords) {
  EXPECT_EQ(lane_values<int64_t>(RandomInt{-5, (1 << 28) + 1}, ScalarType::Long, 2),
            (std::vector<int64_t>{250296465, 92673990}));
  EXPECT_EQ(lane_values<int64_t>(RandomInt{0, 0}, ScalarType::Long, 2),
            (std::vector<int64_t>{7361108121267848589, -4875238626587255848}));
  EXPECT_EQ(philox_unroll(RandomInt{0, (1 << 28) - 1}, ScalarType::Long), 4);
  EXPECT_EQ(philox_unroll(RandomInt{0, 1 << 28}, ScalarType::Int), 2);
}

// By hand: words modulo each dtype's range.
TEST(PhiloxCudaValues, RandomWithoutBounds) {
  EXPECT_EQ(lane_values<int64_t>(Random{}, ScalarType::Int, 4),
            (std::vector<int64_t>{1713891541, 1634321805, 1012378700, 453041112}));
  EXPECT_EQ(lane_values<int64_t>(Random{}, ScalarType::Byte, 4),
            (std::vector<int64_t>{213, 141, 76, 216}));
  EXPECT_EQ(lane_values<int64_t>(Random{}, ScalarType::Bool, 4),
            (std::vector<int64_t>{1, 1, 0, 0}));
  EXPECT_EQ(lane_values<float>(Random{}, ScalarType::Float, 4),
            (std::vector<float>{2615407, 6931628, 5745552, 56125}));
  EXPECT_EQ(lane_values<float>(Random{}, ScalarType::BFloat16, 4),
            (std::vector<float>{175, 81, 60, 99}));
  EXPECT_EQ(lane_values<int64_t>(Random{}, ScalarType::Long, 1),
            (std::vector<int64_t>{7361108121267848589}));
  EXPECT_EQ(lane_values<double>(Random{}, ScalarType::Double, 1),
            (std::vector<double>{2226330144457308}));
}

// The comparison is with p rounded to float, and strict: the uniform value itself gives 0.
TEST(PhiloxCudaValues, Bernoulli) {
  constexpr float kUniform = 0x1.989fa4p-2F;  // as UniformFloat has it
  EXPECT_EQ(value<float>(Bernoulli{kUniform}, ScalarType::Float, 0), 0);
  EXPECT_EQ(value<float>(Bernoulli{std::nextafter(kUniform, 1.0F)}, ScalarType::Float, 0), 1);
  // Above the value, but not by enough for a float.
  EXPECT_EQ(value<bool>(Bernoulli{kUniform + 1e-12}, ScalarType::Bool, 0), false);
  EXPECT_EQ(value<bool>(Bernoulli{1}, ScalarType::Bool, 0), true);
  EXPECT_EQ(value<float>(Bernoulli{0}, ScalarType::Long, 0), 0);
}

// Words and reals of CUDA 13.0's own curand_init, curand_uniform4 and curand_normal4, compiled for
// the host: seed 0x299f31d0a4093822, subsequence 5, offset 8. Thread 5 of the tiny grid draws them
// in its second round when the generator's offset is 4. The normal values' tolerance: curand's host
// build rounds the angle once more than the device, by up to 2^-22 of up to 2 pi, and libm's sine
// and logarithm are within an ulp; with a radius below 6.7 that is less than 2e-6.
TEST(PhiloxCudaValues, CurandsOwn) {
  constexpr PhiloxState kState = {.seed = 0x299f31d0a4093822, .offset = 4};
  constexpr std::array<int64_t, 4> kWords = {0x92a07f8a, 0xb3aac5ff, 0x1ac92b75, 0x585ce484};
  constexpr std::array<float, 4> kUniforms = {0x1.2541p-1F, 0x1.67558cp-1F, 0x1.ac92b8p-4F,
                                              0x1.617392p-2F};
  constexpr std::array<float, 4> kNormals = {-1.00773537F, -0.314707607F, 1.75609124F,
                                             -1.19614112F};
  for (size_t lane = 0; lane < 4; ++lane) {
    const int64_t element = 1024 + 5 + kLanes[lane];
    EXPECT_EQ(value<int64_t>(Random{}, ScalarType::Int, element, kState, 2048),
              kWords[lane] % (int64_t{1} << 31));
    EXPECT_EQ(value<float>(Uniform{}, ScalarType::Float, element, kState, 2048), kUniforms[lane]);
    EXPECT_NEAR(value<float>(Normal{}, ScalarType::Float, element, kState, 2048), kNormals[lane],
                2e-6);
    // ATen scales by the standard deviation and then adds the mean.
    EXPECT_NEAR(value<float>(Normal{10, 2}, ScalarType::Float, element, kState, 2048),
                10 + 2 * kNormals[lane], 5e-6);
  }
  // curand_uniform2_double and curand_normal2_double, in the second round of 512.
  EXPECT_EQ(value<double>(Uniform{}, ScalarType::Double, 512 + 5, kState), 0x1.675582d407f8ap-1);
  EXPECT_EQ(value<double>(Uniform{}, ScalarType::Double, 512 + 5 + 256, kState),
            0x1.61739149256ebp-2);
  EXPECT_NEAR(value<double>(Normal{}, ScalarType::Double, 512 + 5, kState), 0.69550127640986403,
              1e-14);
  EXPECT_NEAR(value<double>(Normal{}, ScalarType::Double, 512 + 5 + 256, kState),
              -0.47373245105919093, 1e-14);
}

// Both halves of the counter beyond 32 bits: curand's own words for subsequence 2^32 + 2 cannot be
// reached by a grid, but an offset of 2^34 + 4 can; by hand, counter (1, 1, 0, 0).
TEST(PhiloxCudaValues, OffsetsBeyond32Bits) {
  const PhiloxCounter words = philox4x32_10({1, 1, 0, 0}, {0, 0});
  EXPECT_EQ(value<int64_t>(Random{}, ScalarType::Int, 0, {.offset = (uint64_t{1} << 34) + 4}),
            words[0] % (uint32_t{1} << 31));
}

// -ln(u) / lambda; a u that is 1 gives epsilon / 2 and not 0.
TEST(PhiloxCudaValues, Exponential) {
  EXPECT_NEAR(value<float>(Exponential{2}, ScalarType::Float, 0), -std::log(0x1.989fa4p-2) / 2,
              1e-6);
  constexpr PhiloxGrid kWide = {.multiprocessors = 41000, .threads_per_multiprocessor = 256};
  constexpr int64_t kThreads = 41000 * 256;
  EXPECT_EQ(value<float>(Exponential{}, ScalarType::Float, 3 * kThreads + 10475606, kZeros,
                         4 * kThreads, kWide),
            0x1p-24F);
}

void expect_place(const PhiloxLayout& layout, int64_t element, uint64_t subsequence,
                  uint64_t offset, int lane) {
  const PhiloxPlace place = layout.place(element, 0);
  EXPECT_EQ(place.subsequence, subsequence) << "of element " << element;
  EXPECT_EQ(place.offset, offset) << "of element " << element;
  EXPECT_EQ(place.lane, lane) << "of element " << element;
}

// By hand. A grid that is not at its greatest has as many threads as elements, rounded up to
// blocks.
TEST(PhiloxLayout, SmallTensorsUseTheFirstLane) {
  const PhiloxLayout layout(1000, 4, 4, kHopper);
  expect_place(layout, 0, 0, 0, 0);
  expect_place(layout, 999, 999, 0, 0);
  EXPECT_EQ(layout.offset_increment(), 4U);
  EXPECT_EQ(PhiloxLayout(0, 4, 4, kHopper).offset_increment(), 0U);
}

// By hand: 270336 threads, rounds of 4 * 270336 = 1081344 elements (2 * 270336 = 540672 in double).
TEST(PhiloxLayout, LargeTensorsUseEveryLaneAndThenTheNextRound) {
  const PhiloxLayout layout(3000000, 4, 4, kHopper);
  expect_place(layout, 270335, 270335, 0, 0);
  expect_place(layout, 270336, 0, 0, 1);
  expect_place(layout, 1081343, 270335, 0, 3);
  expect_place(layout, 1081344, 0, 4, 0);
  expect_place(layout, 2999999, 2999999 - 2 * 1081344 - 3 * 270336, 8, 3);
  EXPECT_EQ(layout.offset_increment(), 12U);
  const PhiloxLayout wide(3000000, 8, 2, kHopper);
  expect_place(wide, 540671, 270335, 0, 1);
  expect_place(wide, 540672, 0, 4, 0);
  EXPECT_EQ(wide.offset_increment(), 24U);
}

TEST(PhiloxLayout, IncrementAtTheEdgeOfARound) {
  EXPECT_EQ(PhiloxLayout(1081344, 4, 4, kHopper).offset_increment(), 4U);
  EXPECT_EQ(PhiloxLayout(1081345, 4, 4, kHopper).offset_increment(), 8U);
  // Blocks a multiprocessor round down: 1536 + 255 threads are 6 blocks of 256.
  const PhiloxLayout layout(100000, 4, 4,
                            {.multiprocessors = 2, .threads_per_multiprocessor = 1791});
  expect_place(layout, 2 * 6 * 256, 0, 0, 1);
}

// By hand: 2^29 floats still have 32-bit offsets, 1 + (2^29 - 1) * 4 being below 2^31; one more,
// and the op first takes the whole's increment, ceil((2^29 + 1) / 1081344) = 497 rounds, and then
// draws 2^28 elements, 249 rounds, and 2^28 + 1 elements, 249 again.
TEST(PhiloxLayout, TensorsBeyond32BitOffsets) {
  constexpr int64_t kFits = int64_t{1} << 29;
  const PhiloxLayout fits(kFits, 4, 4, kHopper);
  EXPECT_EQ(fits.offset_increment(), 4U * 497);
  expect_place(fits, 0, 0, 0, 0);
  const PhiloxLayout split(kFits + 1, 4, 4, kHopper);
  EXPECT_EQ(split.offset_increment(), 4U * (497 + 249 + 249));
  expect_place(split, 0, 0, 4 * 497, 0);
  expect_place(split, kFits / 2 - 1, (kFits / 2 - 1) % 270336, 4 * (497 + 248),
               static_cast<int>((kFits / 2 - 1) / 270336 % 4));
  expect_place(split, kFits / 2, 0, 4 * (497 + 249), 0);
}

// The pieces and their order, beside ATen's own TensorIterator on a tensor that has no memory.
TEST(PhiloxLayout, PiecesAreThoseOfTensorIterator) {
  float unused = 0;
  for (const int64_t numel : {(int64_t{1} << 29), (int64_t{1} << 29) + 1, int64_t{1500000001},
                              (int64_t{1} << 31) - 1, (int64_t{1} << 33) + 12345}) {
    const at::Tensor tensor = at::from_blob(&unused, {numel}, at::kFloat);
    const auto whole = at::TensorIterator::borrowing_nullary_op(tensor);
    const PhiloxLayout layout(numel, 4, 4, kHopper);
    int64_t first = 0;
    uint64_t offset = layout.place(0, 0).offset;
    const auto rounds = [](int64_t n) { return static_cast<uint64_t>((n + 1081343) / 1081344); };
    EXPECT_EQ(offset, whole.can_use_32bit_indexing() ? 0 : 4 * rounds(numel));
    for (auto& piece : whole.with_32bit_indexing()) {
      ASSERT_EQ(piece.data_ptr(0), &unused + first);
      // The first element of each piece is thread 0's first value.
      expect_place(layout, first, 0, offset, 0);
      first += piece.numel();
      offset += 4 * rounds(piece.numel());
    }
    EXPECT_EQ(first, numel);
    EXPECT_EQ(layout.offset_increment(), offset);
  }
}

// Every window, drawn as a tensor of its own, holds the whole tensor's bits; together they cover
// what was asked for; none is longer than a round. So a rank that runs ATen's op on them has its
// shard's values without the unsharded tensor.
void check_windows(const Distribution& distribution, ScalarType dtype, int64_t numel,
                   PhiloxGrid grid, PhiloxState state, int64_t first, int64_t count) {
  const PhiloxLayout layout = philox_layout(distribution, dtype, numel, grid);
  const int64_t round = grid.multiprocessors * (grid.threads_per_multiprocessor / 256) * 256 *
                        philox_unroll(distribution, dtype);
  const at::Tensor whole = philox_cuda_values(distribution, dtype, numel, state, grid, 0, numel);
  int64_t covered = first;
  for (const PhiloxWindow& window : layout.windows(first, count, state.offset)) {
    RC_ASSERT(window.first <= covered);
    RC_ASSERT(window.numel > 0);
    RC_ASSERT(window.numel <= round);
    const int64_t end = std::min(window.first + window.numel, numel);
    const at::Tensor scratch = philox_cuda_values(distribution, dtype, window.numel,
                                                  {.seed = state.seed, .offset = window.offset},
                                                  grid, 0, end - window.first);
    RC_ASSERT(at::equal(scratch, whole.slice(0, window.first, end)));
    covered = end;
  }
  RC_ASSERT(covered >= first + count);
}

TEST(PhiloxLayout, WindowsHoldTheWholesBits) {
  EXPECT_TRUE(rc::check([] {
    const PhiloxGrid grid = {.multiprocessors = *rc::gen::inRange<int64_t>(1, 5),
                             .threads_per_multiprocessor = 256 * *rc::gen::inRange<int64_t>(1, 3)};
    const int64_t threads = grid.multiprocessors * grid.threads_per_multiprocessor;
    // One round and less, or up to a few rounds of either unroll factor.
    const int64_t most = *rc::gen::elementOf(std::vector<int64_t>{threads, 9 * threads});
    const auto numel = *rc::gen::inRange<int64_t>(1, most + 1);
    const auto first = *rc::gen::inRange<int64_t>(0, numel);
    const auto count = *rc::gen::inRange<int64_t>(0, numel - first + 1);
    const PhiloxState state = {.seed = *rc::gen::arbitrary<uint64_t>(),
                               .offset = 4 * uint64_t{*rc::gen::arbitrary<uint32_t>()}};
    const auto dtype = *rc::gen::elementOf(
        std::vector<ScalarType>{ScalarType::Float, ScalarType::Double, ScalarType::BFloat16});
    const std::vector<Distribution> distributions = {Uniform{-1, 2},     Normal{1, 3},
                                                     Bernoulli{0.3},     Random{},
                                                     RandomInt{0, 1000}, RandomInt{5, 1 << 30}};
    const Distribution& distribution =
        distributions[*rc::gen::inRange<size_t>(0, distributions.size())];
    RC_LOG() << to_string(distribution) << ", " << c10::toString(dtype) << ", elements " << first
             << " to " << first + count << " of " << numel << ", grid of " << grid.multiprocessors
             << " times " << grid.threads_per_multiprocessor << ", seed " << state.seed
             << ", offset " << state.offset;
    check_windows(distribution, dtype, numel, grid, state, first, count);
  }));
}

// By hand: pieces of 2^28 (249 rounds, the last of them begins at 248 * 1081344) and 2^28 + 1.
TEST(PhiloxLayout, WindowsAcrossPieces) {
  constexpr int64_t kHalf = int64_t{1} << 28;
  const PhiloxLayout layout(2 * kHalf + 1, 4, 4, kHopper);
  const std::vector<PhiloxWindow> windows = layout.windows(kHalf - 10, 20, 100);
  ASSERT_EQ(windows.size(), 2U);
  EXPECT_EQ(windows[0].first, int64_t{248} * 1081344);
  EXPECT_EQ(windows[0].numel, std::max<int64_t>(kHalf - int64_t{248} * 1081344, 270336));
  EXPECT_EQ(windows[0].offset, 100U + 4 * (497 + 248));
  EXPECT_EQ(windows[1].first, kHalf);
  EXPECT_EQ(windows[1].numel, 270336);
  EXPECT_EQ(windows[1].offset, 100U + 4 * (497 + 249));
}

TEST(PhiloxLayout, AnEmptyPartHasNoWindow) {
  EXPECT_TRUE(PhiloxLayout(0, 4, 4, kHopper).windows(0, 0, 0).empty());
  EXPECT_TRUE(PhiloxLayout(10, 4, 4, kHopper).windows(10, 0, 0).empty());
}

TEST(PhiloxLayout, BadInput) {
  EXPECT_THROW(PhiloxLayout(-1, 4, 4, kHopper), c10::Error);
  EXPECT_THROW(PhiloxLayout(1, 0, 4, kHopper), c10::Error);
  EXPECT_THROW(PhiloxLayout(1, 4, 3, kHopper), c10::Error);
  EXPECT_THROW(PhiloxLayout(1, 4, 4, {0, 2048}), c10::Error);
  EXPECT_THROW(PhiloxLayout(1, 4, 4, {132, 255}), c10::Error);
  const PhiloxLayout layout(10, 4, 4, kHopper);
  EXPECT_THROW(layout.place(10, 0), c10::Error);
  EXPECT_THROW(layout.place(-1, 0), c10::Error);
  EXPECT_THROW(layout.windows(0, 11, 0), c10::Error);
  EXPECT_THROW(layout.windows(-1, 1, 0), c10::Error);
  EXPECT_THROW(philox_cuda_values(Uniform{}, ScalarType::Float, 10, {.offset = 2}, kHopper, 0, 1),
               c10::Error);
  EXPECT_THROW(philox_cuda_values(Uniform{}, ScalarType::Float, 10, kZeros, kHopper, 9, 2),
               c10::Error);
  EXPECT_THROW(philox_cuda_values(Normal{}, ScalarType::Long, 10, kZeros, kHopper, 0, 1),
               c10::Error);
}

}  // namespace
}  // namespace ppfsdp::dtensor
