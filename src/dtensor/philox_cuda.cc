#include "src/dtensor/philox_cuda.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

namespace ppfsdp::dtensor {
namespace {

constexpr int64_t kBlock = 256;           // threads
constexpr uint64_t kWordsPerDraw = 4;     // of the generator's offset
constexpr uint64_t kWideRange = 1 << 28;  // random_from_to_kernel: from here on 64 bits a value

bool draws_64_bits(const Distribution& distribution, c10::ScalarType dtype) {
  if (const auto* ints = std::get_if<RandomInt>(&distribution)) {
    return ints->range == 0 || ints->range >= kWideRange;
  }
  if (std::holds_alternative<Random>(distribution)) {
    return dtype == c10::ScalarType::Double || dtype == c10::ScalarType::Long;
  }
  return dtype == c10::ScalarType::Double;
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// curand_uniform.h, _curand_uniform4: in (0, 1]. The product is exact, so that it does not matter
// whether the device fuses it with the addition.
float uniform_float(uint32_t word) { return static_cast<float>(word) * 0x1p-32F + 0x1p-33F; }

// curand_uniform.h, _curand_uniform_double_hq: 53 bits of two words; overlapping ones are combined.
double bits53(uint32_t low, uint32_t high) {
  return static_cast<double>(uint64_t{low} ^ (uint64_t{high} << 21));
}
double uniform_double(uint32_t low, uint32_t high) { return bits53(low, high) * 0x1p-53 + 0x1p-54; }

// curand_normal.h, _curand_box_muller. The two of a pair are (sine, cosine).
float normal_float(uint32_t x, uint32_t y, bool second) {
  constexpr float kTurn = 2.3283064e-10F * 6.2831855F;
  const float radius = std::sqrt(-2.0F * std::log(uniform_float(x)));
  const float angle = std::fma(static_cast<float>(y), kTurn, kTurn / 2);
  return (second ? std::cos(angle) : std::sin(angle)) * radius;
}

// curand_normal.h, _curand_box_muller_double.
double normal_double(const PhiloxCounter& words, bool second) {
  constexpr double kPi = 3.14159265358979323846;
  const double radius = std::sqrt(-2.0 * std::log(uniform_double(words[0], words[1])));
  const double half_turns = bits53(words[2], words[3]) * 0x1p-52 + 0x1p-53;
  return (second ? std::cos(half_turns * kPi) : std::sin(half_turns * kPi)) * radius;
}

// The type in which the kernel for scalar_t computes reals: accscalar_t and opmath_t of its source.
template <typename scalar_t>
using Real = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;

template <typename scalar_t>
Real<scalar_t> uniform_real(const PhiloxCounter& words, int lane) {
  if constexpr (std::is_same_v<scalar_t, double>) {
    return uniform_double(words[2 * lane], words[2 * lane + 1]);
  } else {
    return uniform_float(words[lane]);
  }
}

// DistributionTemplates.h, uniform_kernel. The bounds are first rounded to the dtype, and so is
// their difference.
template <typename scalar_t>
scalar_t draw(const Uniform& d, const PhiloxCounter& words, int lane) {
  const auto from = static_cast<scalar_t>(d.from);
  const auto to = static_cast<scalar_t>(d.to);
  const auto range = static_cast<Real<scalar_t>>(static_cast<scalar_t>(to - from));
  const auto value = static_cast<scalar_t>(
      std::fma(uniform_real<scalar_t>(words, lane), range, static_cast<Real<scalar_t>>(from)));
  return value == to ? from : value;
}

template <typename scalar_t>
scalar_t draw(const Normal& d, const PhiloxCounter& words, int lane) {
  Real<scalar_t> value;
  if constexpr (std::is_same_v<scalar_t, double>) {
    value = normal_double(words, lane == 1);
  } else {
    const int pair = lane / 2 * 2;
    value = normal_float(words[pair], words[pair + 1], lane % 2 == 1);
  }
  return static_cast<scalar_t>(
      std::fma(value, static_cast<Real<scalar_t>>(d.std), static_cast<Real<scalar_t>>(d.mean)));
}

template <typename scalar_t>
scalar_t draw(const Bernoulli& d, const PhiloxCounter& words, int lane) {
  return static_cast<scalar_t>(uniform_real<scalar_t>(words, lane) <
                               static_cast<Real<scalar_t>>(d.p));
}

// TransformationHelper.h, exponential, as it reads for the device.
template <typename scalar_t>
scalar_t draw(const Exponential& d, const PhiloxCounter& words, int lane) {
  using real = Real<scalar_t>;
  constexpr real kHalfEpsilon = std::numeric_limits<real>::epsilon() / 2;
  const real uniform = uniform_real<scalar_t>(words, lane);
  const real log = uniform >= real{1} - kHalfEpsilon ? -kHalfEpsilon : std::log(uniform);
  return static_cast<scalar_t>(real{-1} / static_cast<real>(d.lambda) * log);
}

uint64_t word64(const PhiloxCounter& words, int lane) {
  return uint64_t{words[2 * lane]} << 32 | words[2 * lane + 1];
}

// TransformationHelper.h, uniform_int_from_to and uniform_int_full_range.
template <typename scalar_t>
scalar_t draw(const RandomInt& d, const PhiloxCounter& words, int lane) {
  if (d.range == 0) {
    return static_cast<scalar_t>(static_cast<int64_t>(word64(words, lane)));
  }
  const uint64_t word = d.range >= kWideRange ? word64(words, lane) : words[lane];
  return static_cast<scalar_t>(
      static_cast<int64_t>(word % d.range + static_cast<uint64_t>(d.from)));
}

// TransformationHelper.h, uniform_int.
template <typename scalar_t>
scalar_t draw(const Random&, const PhiloxCounter& words, int lane) {
  constexpr bool kWide = std::is_same_v<scalar_t, double> || std::is_same_v<scalar_t, int64_t>;
  const uint64_t word = kWide ? word64(words, lane) : words[lane];
  return static_cast<scalar_t>(word % random_range(c10::CppTypeToScalarType<scalar_t>::value));
}

}  // namespace

PhiloxLayout::PhiloxLayout(int64_t numel, int64_t element_size, int unroll, PhiloxGrid grid)
    : numel_(numel),
      element_size_(element_size),
      unroll_(unroll),
      max_blocks_(grid.multiprocessors * (grid.threads_per_multiprocessor / kBlock)) {
  TORCH_CHECK(numel >= 0, "PhiloxLayout: numel is ", numel, ", not a number of elements");
  TORCH_CHECK(element_size > 0, "PhiloxLayout: elements of ", element_size, " bytes");
  TORCH_CHECK(unroll == 4 || unroll == 2, "PhiloxLayout: unroll is ", unroll,
              "; a draw of 128 bits gives 4 or 2 values");
  TORCH_CHECK(grid.multiprocessors > 0 && grid.threads_per_multiprocessor >= kBlock,
              "PhiloxLayout: a device of ", grid.multiprocessors, " multiprocessors with ",
              grid.threads_per_multiprocessor,
              " threads each; needs one or more, with 256 or more");
  if (numel > 0) {
    add_pieces(0, numel);
  }
}

int64_t PhiloxLayout::threads_for(int64_t numel) const {
  return kBlock * std::min(max_blocks_, ceil_div(numel, kBlock));
}

uint64_t PhiloxLayout::increment_for(int64_t numel) const {
  return kWordsPerDraw * static_cast<uint64_t>(ceil_div(numel, threads_for(numel) * unroll_));
}

void PhiloxLayout::add_pieces(int64_t first, int64_t numel) {
  // One more than the last element's first byte, as can_use_32bit_indexing counts.
  const bool fits = 1 + (numel - 1) * element_size_ <= std::numeric_limits<int32_t>::max();
  if (fits) {
    pieces_.push_back({first, numel, threads_for(numel), increment_});
    increment_ += increment_for(numel);
    return;
  }
  if (first == 0 && numel == numel_) {
    increment_ += increment_for(numel);
  }
  add_pieces(first, numel / 2);
  add_pieces(first + numel / 2, numel - numel / 2);
}

const PhiloxLayout::Piece& PhiloxLayout::piece_of(int64_t element) const {
  const auto after =
      std::upper_bound(pieces_.begin(), pieces_.end(), element,
                       [](int64_t value, const Piece& piece) { return value < piece.first; });
  return *std::prev(after);
}

PhiloxPlace PhiloxLayout::place(int64_t element, uint64_t offset) const {
  TORCH_CHECK(element >= 0 && element < numel_, "PhiloxLayout: element ", element,
              " of a tensor of ", numel_);
  const Piece& piece = piece_of(element);
  const int64_t in_piece = element - piece.first;
  const int64_t draw = in_piece / piece.threads;  // round * unroll + lane
  return {.subsequence = static_cast<uint64_t>(in_piece % piece.threads),
          .offset = offset + piece.offset + kWordsPerDraw * static_cast<uint64_t>(draw / unroll_),
          .lane = static_cast<int>(draw % unroll_)};
}

std::vector<PhiloxWindow> PhiloxLayout::windows(int64_t first, int64_t count,
                                                uint64_t offset) const {
  TORCH_CHECK(first >= 0 && count >= 0 && first <= numel_ - count, "PhiloxLayout: elements ", first,
              " to ", first + count, " of a tensor of ", numel_);
  std::vector<PhiloxWindow> result;
  const int64_t end = first + count;
  while (first < end) {
    const Piece& piece = piece_of(first);
    const int64_t begin = first - piece.first;
    const int64_t stop = std::min(end - piece.first, piece.numel);
    if (piece.numel <= piece.threads) {
      // Each thread draws once and uses its first value: a shorter tensor has fewer threads, with
      // the same values.
      result.push_back({piece.first, stop, offset + piece.offset});
      first = piece.first + stop;
      continue;
    }
    // The grid is at its greatest. It still is for a scratch tensor of one element a thread, and
    // each thread's first draw there is its draw of this round.
    const int64_t round = begin / (piece.threads * unroll_);
    const int64_t round_begin = round * piece.threads * unroll_;
    const int64_t round_stop = std::min(stop, round_begin + piece.threads * unroll_);
    result.push_back({piece.first + round_begin, std::max(round_stop - round_begin, piece.threads),
                      offset + piece.offset + kWordsPerDraw * static_cast<uint64_t>(round)});
    first = piece.first + round_stop;
  }
  return result;
}

int philox_unroll(const Distribution& distribution, c10::ScalarType dtype) {
  return draws_64_bits(distribution, dtype) ? 2 : 4;
}

PhiloxLayout philox_layout(const Distribution& distribution, c10::ScalarType dtype, int64_t numel,
                           PhiloxGrid grid) {
  return PhiloxLayout(numel, static_cast<int64_t>(c10::elementSize(dtype)),
                      philox_unroll(distribution, dtype), grid);
}

at::Tensor philox_cuda_values(const Distribution& distribution, c10::ScalarType dtype,
                              int64_t numel, PhiloxState state, PhiloxGrid grid, int64_t first,
                              int64_t count) {
  check_distribution("philox_cuda_values", distribution, dtype);
  TORCH_CHECK(state.offset % kWordsPerDraw == 0, "philox_cuda_values: a generator's offset of ",
              state.offset, "; ATen's are multiples of 4");
  TORCH_CHECK(first >= 0 && count >= 0 && first <= numel - count, "philox_cuda_values: elements ",
              first, " to ", first + count, " of a tensor of ", numel);
  const PhiloxLayout layout = philox_layout(distribution, dtype, numel, grid);
  at::Tensor values = at::empty({count}, dtype);
  AT_DISPATCH_ALL_TYPES_AND3(at::kHalf, at::kBFloat16, at::kBool, dtype, "philox_cuda_values", [&] {
    scalar_t* const out = values.data_ptr<scalar_t>();
    std::visit(
        [&](const auto& typed) {
          for (int64_t i = 0; i < count; ++i) {
            const PhiloxPlace place = layout.place(first + i, state.offset);
            const PhiloxCounter words =
                philox4x32_10(philox_counter(place.offset / kWordsPerDraw, place.subsequence),
                              philox_key(state.seed));
            out[i] = draw<scalar_t>(typed, words, place.lane);
          }
        },
        distribution);
  });
  return values;
}

}  // namespace ppfsdp::dtensor
