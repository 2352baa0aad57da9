#include "src/optim/power_sum.h"

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>
#include <type_traits>

// The same templates are compiled for several vector widths, and inlined into a function for each.
#define PPFSDP_INLINE __attribute__((always_inline)) inline

namespace ppfsdp::optim {
namespace {

/// Terms that are summed up before anything goes to the ExactSum.
constexpr int kBlock = 1024;

template <int kLanes>
struct Vector {
  typedef double Doubles __attribute__((vector_size(kLanes * sizeof(double))));
  typedef int64_t Longs __attribute__((vector_size(kLanes * sizeof(int64_t))));
  typedef float Floats __attribute__((vector_size(kLanes * sizeof(float))));
  typedef int32_t Ints __attribute__((vector_size(kLanes * sizeof(int64_t))));
};

/// What the values of a block have in common: 2^least <= |x| < 2^most for all but the zeros.
struct Range {
  bool zero = false;    ///< all are
  bool finite = false;  ///< all are
  int least = 0;
  int most = 0;
};

/// Of bit patterns without signs. `digits` is the number of stored bits of a significand, `bias`
/// that of the exponent.
template <typename Integer>
PPFSDP_INLINE Range range_of(Integer least, Integer greatest, int digits, int bias) {
  const auto field = [&](Integer bits) { return static_cast<int>(bits >> digits); };
  Range range;
  range.zero = greatest == 0;
  range.finite = field(greatest) <= 2 * bias;
  // Subnormals begin `digits` below the least normal number.
  range.least = field(least) > 0 ? field(least) - bias : 1 - bias - digits;
  range.most = std::max(field(greatest), 1) - bias + 1;
  return range;
}

template <int kLanes>
PPFSDP_INLINE Range range_of(const float* x) {
  using Ints = typename Vector<kLanes>::Ints;
  constexpr int32_t kMask = 0x7fffffff;
  Ints greatest = {};
  Ints least = Ints{} + kMask;
  for (int i = 0; i < kBlock; i += 2 * kLanes) {
    Ints bits;
    std::memcpy(&bits, x + i, sizeof(bits));
    bits &= kMask;
    greatest = bits > greatest ? bits : greatest;
    // One less, so that zero becomes the greatest.
    bits = (bits - 1) & kMask;
    least = bits < least ? bits : least;
  }
  int32_t first = kMask;
  int32_t last = 0;
  for (int k = 0; k < 2 * kLanes; ++k) {
    first = std::min(first, least[k]);
    last = std::max(last, greatest[k]);
  }
  return range_of<int64_t>(int64_t{first} + 1, last, 23, 127);
}

template <int kLanes>
PPFSDP_INLINE Range range_of(const double* x) {
  using Longs = typename Vector<kLanes>::Longs;
  Longs greatest = {};
  Longs least = Longs{} + INT64_MAX;
  for (int i = 0; i < kBlock; i += kLanes) {
    Longs bits;
    std::memcpy(&bits, x + i, sizeof(bits));
    bits &= INT64_MAX;
    greatest = bits > greatest ? bits : greatest;
    bits = (bits - 1) & INT64_MAX;
    least = bits < least ? bits : least;
  }
  int64_t first = INT64_MAX - 1;
  int64_t last = 0;
  for (int k = 0; k < kLanes; ++k) {
    first = std::min(first, least[k]);
    last = std::max(last, greatest[k]);
  }
  return range_of<int64_t>(first + 1, last, 52, 1023);
}

/// The terms of a block as vectors: a float's |x|^kPower for kPower 1, 2 and 3.
template <int kPower>
struct PowersOfFloats {
  const float* x;

  template <int kLanes>
  PPFSDP_INLINE void load(int i, typename Vector<kLanes>::Doubles& terms) const {
    typename Vector<kLanes>::Floats values;
    std::memcpy(&values, x + i, sizeof(values));
    const auto wide = __builtin_convertvector(values, typename Vector<kLanes>::Doubles);
    if constexpr (kPower == 2) {
      terms = wide * wide;
    } else {
      const auto magnitude = wide < 0 ? -wide : wide;
      terms = kPower == 1 ? magnitude : wide * wide * magnitude;
    }
  }
};

/// Doubles as they are.
struct Terms {
  const double* x;

  template <int kLanes>
  PPFSDP_INLINE void load(int i, typename Vector<kLanes>::Doubles& terms) const {
    std::memcpy(&terms, x + i, sizeof(terms));
  }
};

/// The squares of doubles as they round, or what rounding takes away (Dekker's product, exact where
/// nothing overflows or is subnormal).
template <bool kErrors>
struct SquaresOfDoubles {
  const double* x;

  template <int kLanes>
  PPFSDP_INLINE void load(int i, typename Vector<kLanes>::Doubles& terms) const {
    typename Vector<kLanes>::Doubles values;
    std::memcpy(&values, x + i, sizeof(values));
    const auto product = values * values;
    if constexpr (kErrors) {
      constexpr double kSplit = 0x1p27 + 1;
      const auto scaled = kSplit * values;
      const auto high = scaled - (scaled - values);
      const auto low = values - high;
      terms = ((high * high - product) + 2 * (high * low)) + low * low;
    } else {
      terms = product;
    }
  }
};

/// For the exponents of normal doubles.
PPFSDP_INLINE double one_and_a_half_times_2_to(int exponent) {
  return std::bit_cast<double>(static_cast<uint64_t>(exponent + 1023) << 52 | uint64_t{1} << 51);
}

template <int kLanes>
constexpr int kCountBits = std::countr_zero(unsigned{kBlock / kLanes});

/// Adds kBlock terms, all below 2^top in magnitude, to `sum`.
///
/// Each lane has an accumulator a level, which starts at 1.5 * 2^t and never leaves [2^t, 2^(t+1)),
/// where all doubles are multiples of one unit, 2^(t-52). So adding a term rounds it to a multiple
/// of the unit, the accumulator adds up the rounded terms exactly, and what rounding took away is
/// exact too (Dekker's fast two-sum, as the accumulator is greater than the term): it is the next
/// level's term. With n terms a lane, none beyond 2^top, t = top + log2(n) + 2 is enough: rounded
/// terms come to at most n * (2^top + unit / 2) < 2^(t-1). The rest of a term is at most half a
/// unit, 2^(t-53), which is the next level's top. Nothing is left after the last level when all
/// terms are multiples of its unit: see levels_for.
template <int kLanes, int kLevels, typename Source>
PPFSDP_INLINE void deposit(const Source& source, int top, ExactSum& sum) {
  using Doubles = typename Vector<kLanes>::Doubles;
  using Longs = typename Vector<kLanes>::Longs;
  std::array<int, kLevels> exponents;
  std::array<double, kLevels> starts;
  Doubles accumulators[kLevels];
  for (int level = 0; level < kLevels; ++level) {
    exponents[level] = (level == 0 ? top : exponents[level - 1] - 53) + kCountBits<kLanes> + 2;
    starts[level] = one_and_a_half_times_2_to(exponents[level]);
    accumulators[level] = Doubles{} + starts[level];
  }
  for (int i = 0; i < kBlock; i += kLanes) {
    Doubles rest;
    source.template load<kLanes>(i, rest);
    for (int level = 0; level + 1 < kLevels; ++level) {
      const Doubles next = accumulators[level] + rest;
      rest -= next - accumulators[level];
      accumulators[level] = next;
    }
    accumulators[kLevels - 1] += rest;
  }
  for (int level = 0; level < kLevels; ++level) {
    // Bit patterns of doubles of one exponent differ by the number of units between them. A lane's
    // sum is below 2^51 units, so those of all lanes fit together.
    const Longs units = reinterpret_cast<Longs>(accumulators[level]);
    int64_t total = 0;
    for (int k = 0; k < kLanes; ++k) total += units[k] - std::bit_cast<int64_t>(starts[level]);
    sum.add(total, exponents[level] - 52);
  }
}

/// How many levels take terms below 2^top that are multiples of 2^lowest. With 8 lanes a level has
/// 44 bits, so that two are enough for the squares of floats within 2^-20 of the greatest, and one
/// for those of bfloat16s within 2^-14.
template <int kLanes>
PPFSDP_INLINE int levels_for(int top, int lowest) {
  constexpr int kLevelBits = 51 - kCountBits<kLanes>;
  // The first has one bit less than the others.
  return std::max(1, (top - lowest + kLevelBits) / kLevelBits);
}

/// Between these no accumulator of four levels overflows or is subnormal.
constexpr int kLeastTop = -800;
constexpr int kMostTop = 1000;

/// Adds kBlock terms, below 2^top and multiples of 2^lowest, to `sum`. False, with nothing added,
/// when their exponents are too extreme or too far apart for vectors.
template <int kLanes, typename Source>
PPFSDP_INLINE bool add_block(const Source& source, int top, int lowest, ExactSum& sum) {
  if (top < kLeastTop || top > kMostTop) return false;
  switch (levels_for<kLanes>(top, lowest)) {
    case 1:
      deposit<kLanes, 1>(source, top, sum);
      return true;
    case 2:
      deposit<kLanes, 2>(source, top, sum);
      return true;
    case 3:
      deposit<kLanes, 3>(source, top, sum);
      return true;
    case 4:
      deposit<kLanes, 4>(source, top, sum);
      return true;
    default:
      return false;
  }
}

/// `digits`: stored bits of the significands that the floats had before they became floats.
template <int kLanes, int kPower>
PPFSDP_INLINE void add_powers(const float* x, int digits, ExactSum& sum) {
  const Range range = range_of<kLanes>(x);
  if (range.zero) return;
  // Powers 1 and 2 are exact; the third is rounded to 53 bits.
  const int lowest = kPower * range.least - (kPower < 3 ? kPower * digits : 52);
  if (range.finite &&
      add_block<kLanes>(PowersOfFloats<kPower>{x}, kPower * range.most, lowest, sum)) {
    return;
  }
  for (int i = 0; i < kBlock; ++i) {
    const double magnitude = std::abs(static_cast<double>(x[i]));
    double term = magnitude;
    for (int k = 1; k < kPower; ++k) term *= magnitude;
    sum.add(term);
  }
}

template <int kLanes>
PPFSDP_INLINE void add_terms(const double* terms, ExactSum& sum) {
  const Range range = range_of<kLanes>(terms);
  if (range.zero) return;
  if (range.finite && add_block<kLanes>(Terms{terms}, range.most, range.least - 52, sum)) return;
  for (int i = 0; i < kBlock; ++i) sum.add(terms[i]);
}

template <int kLanes>
PPFSDP_INLINE void add_squares(const double* x, ExactSum& sum) {
  const Range range = range_of<kLanes>(x);
  if (range.zero) return;
  // So far from the ends Dekker's product is exact (its least bit is at 2 * (-370 - 52) = -844),
  // and the exponents of squares and errors are none that add_block refuses.
  constexpr int kSafe = 370;
  static_assert(2 * -kSafe - 53 >= kLeastTop && 2 * kSafe <= kMostTop);
  const int top = 2 * range.most;
  const int lowest = 2 * range.least - 52;
  if (range.finite && range.least >= -kSafe && range.most <= kSafe &&
      add_block<kLanes>(SquaresOfDoubles<false>{x}, top, lowest, sum)) {
    // The errors span one bit less than the squares, so that they fit where those did.
    add_block<kLanes>(SquaresOfDoubles<true>{x}, top - 53, lowest - 52, sum);
    return;
  }
  for (int i = 0; i < kBlock; ++i) sum.add_square(x[i]);
}

/// x[0, count) as kBlock values of another type, padded with zeros; in `scratch` unless they lie
/// ready.
template <typename To, typename T>
PPFSDP_INLINE const To* block_of(const T* x, int64_t count, To* scratch) {
  if constexpr (std::is_same_v<T, To>) {
    if (count == kBlock) return x;
  }
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    // The shift alone; a loop of constant length, which is vectorised.
    if (count == kBlock) {
      for (int i = 0; i < kBlock; ++i) {
        scratch[i] = std::bit_cast<float>(static_cast<uint32_t>(x[i].x) << 16);
      }
      return scratch;
    }
  }
  for (int64_t i = 0; i < count; ++i) scratch[i] = static_cast<To>(x[i]);
  std::fill(scratch + count, scratch + kBlock, To{0});
  return scratch;
}

/// Stored bits of a significand.
template <typename T>
constexpr int kDigits = std::numeric_limits<T>::digits - 1;

/// The terms of x[0, n), for vectors of kLanes doubles.
template <int kLanes, typename T>
PPFSDP_INLINE void add_all(const T* x, int64_t n, double p, ExactSum& sum) {
  constexpr bool kIsDouble = std::is_same_v<T, double>;
  std::array<std::conditional_t<kIsDouble, double, float>, kBlock> scratch;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const auto* block = block_of(x + begin, std::min<int64_t>(kBlock, n - begin), scratch.data());
    if constexpr (kIsDouble) {
      if (p == 2) {
        add_squares<kLanes>(block, sum);
        continue;
      }
    } else {
      if (p == 1) add_powers<kLanes, 1>(block, kDigits<T>, sum);
      if (p == 2) add_powers<kLanes, 2>(block, kDigits<T>, sum);
      if (p == 3) add_powers<kLanes, 3>(block, kDigits<T>, sum);
      if (p == 1 || p == 2 || p == 3) continue;
    }
    // Not those of the padding, whose power may be infinite.
    const int count = static_cast<int>(std::min<int64_t>(kBlock, n - begin));
    std::array<double, kBlock> terms = {};
    for (int i = 0; i < count; ++i) {
      const double magnitude = std::abs(static_cast<double>(block[i]));
      terms[i] = p == 1   ? magnitude
                 : p == 3 ? magnitude * magnitude * magnitude
                          : std::pow(magnitude, p);
    }
    add_terms<kLanes>(terms.data(), sum);
  }
}

template <typename T>
using AddAll = void (*)(const T* x, int64_t n, double p, ExactSum& sum);

template <typename T>
void add_all_baseline(const T* x, int64_t n, double p, ExactSum& sum) {
  add_all<2>(x, n, p, sum);
}

#if defined(__x86_64__)
template <typename T>
__attribute__((target("avx2"))) void add_all_avx2(const T* x, int64_t n, double p, ExactSum& sum) {
  add_all<4>(x, n, p, sum);
}

template <typename T>
__attribute__((target("avx512f,avx512dq,avx512vl"))) void add_all_avx512(const T* x, int64_t n,
                                                                         double p, ExactSum& sum) {
  add_all<8>(x, n, p, sum);
}
#endif

template <typename T>
AddAll<T> choose(int most_lanes) {
#if defined(__x86_64__)
  if (most_lanes >= 8 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return add_all_avx512<T>;
  }
  if (most_lanes >= 4 && __builtin_cpu_supports("avx2")) return add_all_avx2<T>;
#endif
  return add_all_baseline<T>;
}

template <typename T>
void add_elements(const at::Tensor& tensor, double p, ExactSum& sum, int most_lanes) {
  const AddAll<T> add = choose<T>(most_lanes);
  const T* x = tensor.const_data_ptr<T>();
  constexpr int64_t kGrain = int64_t{64} * kBlock;
  std::mutex mutex;
  at::parallel_for(0, tensor.numel(), kGrain, [&](int64_t begin, int64_t end) {
    ExactSum part;
    add(x + begin, end - begin, p, part);
    const std::lock_guard<std::mutex> lock(mutex);
    sum.add(part);
  });
}

}  // namespace

void add_power_sum(const at::Tensor& tensor, double p, ExactSum& sum, int most_lanes) {
  TORCH_CHECK(std::isfinite(p) && p != 0, "add_power_sum: p must be finite and not 0, got ", p);
  TORCH_CHECK(tensor.device().is_cpu(), "add_power_sum: needs a tensor on the CPU, got one on ",
              tensor.device());
  const at::Tensor contiguous = tensor.contiguous();
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return add_elements<float>(contiguous, p, sum, most_lanes);
    case at::kBFloat16:
      return add_elements<c10::BFloat16>(contiguous, p, sum, most_lanes);
    case at::kHalf:
      return add_elements<c10::Half>(contiguous, p, sum, most_lanes);
    case at::kDouble:
      return add_elements<double>(contiguous, p, sum, most_lanes);
    default:
      TORCH_CHECK(false, "add_power_sum: needs float32, bfloat16, float16 or float64, got ",
                  tensor.scalar_type());
  }
}

}  // namespace ppfsdp::optim
