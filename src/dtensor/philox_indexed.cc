#include "src/dtensor/philox_indexed.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <type_traits>
#include <vector>

namespace ppfsdp::dtensor {
namespace {

constexpr int kBatch = 64;  // blocks of four words that are made at once

using Words = std::array<uint32_t, 4 * kBatch>;
using Reals = std::array<double, 4 * kBatch>;

// ln(u) for u in (0, 1], normal numbers: u = m 2^e with m in (sqrt(1/2), sqrt(2)], and
// ln m = 2 atanh(t) with t = (m - 1) / (m + 1), |t| < 0.1716; the first term of atanh's series that
// is left out is t^21 / 21, less than 2^-55 of the sum.
double natural_log(double u) {
  constexpr double kLn2 = 0.693147180559945309417232121458;
  constexpr double kSqrt2 = 1.41421356237309504880168872421;
  const uint64_t bits = std::bit_cast<uint64_t>(u);
  const double above_one = std::bit_cast<double>((bits & 0x000FFFFFFFFFFFFF) | 0x3FF0000000000000);
  const bool high = above_one > kSqrt2;
  const double m = high ? above_one * 0.5 : above_one;
  const auto exponent = static_cast<double>(static_cast<int>(bits >> 52) - 1023 + (high ? 1 : 0));
  const double t = (m - 1) / (m + 1);
  const double s = t * t;
  double sum = 1.0 / 19;
  sum = sum * s + 1.0 / 17;
  sum = sum * s + 1.0 / 15;
  sum = sum * s + 1.0 / 13;
  sum = sum * s + 1.0 / 11;
  sum = sum * s + 1.0 / 9;
  sum = sum * s + 1.0 / 7;
  sum = sum * s + 1.0 / 5;
  sum = sum * s + 1.0 / 3;
  sum = sum * s;
  return exponent * kLn2 + (2 * t + 2 * t * sum);
}

struct SinCos {
  double sin;
  double cos;
};

// Sine and cosine of `turn` times 2 pi, turn in [0, 1): the nearest quarter turn is taken off,
// which is exact, and Taylor's series serve the rest, |x| <= pi/4; the first terms left out are
// x^17/17! and x^18/18!, below 2^-53.
SinCos sin_cos_of_turn(double turn) {
  constexpr double kTwoPi = 6.28318530717958647692528676656;
  const int quarter = static_cast<int>(turn * 4 + 0.5);
  const double x = (turn - quarter * 0.25) * kTwoPi;
  const double s = x * x;
  double sine = -1.0 / 1307674368000;
  sine = sine * s + 1.0 / 6227020800;
  sine = sine * s - 1.0 / 39916800;
  sine = sine * s + 1.0 / 362880;
  sine = sine * s - 1.0 / 5040;
  sine = sine * s + 1.0 / 120;
  sine = sine * s - 1.0 / 6;
  sine = x + x * (sine * s);
  double cosine = 1.0 / 20922789888000;
  cosine = cosine * s - 1.0 / 87178291200;
  cosine = cosine * s + 1.0 / 479001600;
  cosine = cosine * s - 1.0 / 3628800;
  cosine = cosine * s + 1.0 / 40320;
  cosine = cosine * s - 1.0 / 720;
  cosine = cosine * s + 1.0 / 24;
  cosine = 1 - (0.5 * s - s * s * cosine);
  const double swapped_sine = (quarter & 1) != 0 ? cosine : sine;
  const double swapped_cosine = (quarter & 1) != 0 ? sine : cosine;
  return {(quarter & 2) != 0 ? -swapped_sine : swapped_sine,
          ((quarter + 1) & 2) != 0 ? -swapped_cosine : swapped_cosine};
}

void make_words(uint64_t first_block, uint64_t draw, PhiloxKey key, int blocks, Words& words) {
  for (int b = 0; b < blocks; ++b) {
    const PhiloxCounter block = philox4x32_10(philox_counter(first_block + b, draw), key);
    std::copy(block.begin(), block.end(), words.begin() + 4 * b);
  }
}

uint64_t word64(const Words& words, int i) {
  return uint64_t{words[2 * i]} << 32 | words[2 * i + 1];
}

// The words as fractions in [0, 1), of `kBits` bits of a word of 32 (or of 64, when `kWide`).
template <bool kWide, int kBits>
double fraction(const Words& words, int i) {
  if constexpr (kWide) {
    static_assert(kBits == 53);
    return static_cast<double>(static_cast<int64_t>(word64(words, i) >> 11)) * 0x1p-53;
  } else {
    return static_cast<double>(static_cast<int64_t>(words[i] >> (32 - kBits))) *
           (1.0 / static_cast<double>(int64_t{1} << kBits));
  }
}

// The values of a batch, one for each 32 (kWide: 64) bits of `words`.
template <bool kWide>
void transform(const Uniform& d, const Words& words, int count, Reals& out) {
  const double range = d.to - d.from;
  for (int i = 0; i < count; ++i) {
    out[i] = d.from + range * fraction < kWide, kWide ? 53 : 24 > (words, i);
  }
}

template <bool kWide>
void transform(const Normal& d, const Words& words, int count, Reals& out) {
  for (int i = 0; i < count; i += 2) {
    const double u = 1 - fraction < kWide, kWide ? 53 : 32 > (words, i);
    const SinCos direction = sin_cos_of_turn(fraction < kWide, kWide ? 53 : 32 > (words, i + 1));
    const double radius = std::sqrt(-2 * natural_log(u));
    out[i] = d.mean + d.std * (radius * direction.cos);
    out[i + 1] = d.mean + d.std * (radius * direction.sin);
  }
}

template <bool kWide>
void transform(const Bernoulli& d, const Words& words, int count, Reals& out) {
  for (int i = 0; i < count; ++i) {
    out[i] = fraction < kWide, kWide ? 53 : 32 > (words, i) < d.p ? 1 : 0;
  }
}

template <bool kWide>
void transform(const Exponential& d, const Words& words, int count, Reals& out) {
  for (int i = 0; i < count; ++i) {
    // Not -ln(u): an exponential's values are not negative zero.
    out[i] = (0 - natural_log(1 - fraction < kWide, kWide ? 53 : 32 > (words, i))) / d.lambda;
  }
}

// By float, as the header says: 24 bits of Uniform stay what they are for every narrower dtype.
template <typename scalar_t>
scalar_t rounded(double value) {
  if constexpr (std::is_same_v<scalar_t, double>) {
    return value;
  } else {
    return static_cast<scalar_t>(static_cast<float>(value));
  }
}

// Calls fill(words, blocks, first value of the batch) for batches that cover values
// [first, first + count) of `lanes` a block.
template <typename Fill>
void for_batches(int64_t first, int64_t count, int lanes, uint64_t seed, uint64_t draw,
                 const Fill& fill) {
  const PhiloxKey key = philox_key(seed);
  const int64_t end_block = (first + count + lanes - 1) / lanes;
  Words words;
  for (int64_t block = first / lanes; block < end_block; block += kBatch) {
    const int blocks = static_cast<int>(std::min<int64_t>(kBatch, end_block - block));
    make_words(static_cast<uint64_t>(block), draw, key, blocks, words);
    fill(words, blocks, block * lanes);
  }
}

// The part of a batch's values that lies in [first, first + count): {begin in the batch, end}.
struct Part {
  int begin;
  int end;
};
Part part_of(int64_t batch_first, int values, int64_t first, int64_t count) {
  return {static_cast<int>(std::max<int64_t>(0, first - batch_first)),
          static_cast<int>(std::min<int64_t>(values, first + count - batch_first))};
}

template <typename scalar_t, typename D>
void fill_reals(scalar_t* out, int64_t first, int64_t count, const D& distribution, uint64_t seed,
                uint64_t draw) {
  constexpr bool kWide = std::is_same_v<scalar_t, double>;
  constexpr int kLanes = kWide ? 2 : 4;
  Reals values;
  for_batches(first, count, kLanes, seed, draw,
              [&](const Words& words, int blocks, int64_t batch_first) {
                transform<kWide>(distribution, words, blocks * kLanes, values);
                const Part part = part_of(batch_first, blocks * kLanes, first, count);
                // May be negative, where the part begins inside the batch.
                const int64_t offset = batch_first - first;
                for (int i = part.begin; i < part.end; ++i) {
                  out[offset + i] = rounded<scalar_t>(values[i]);
                }
                if constexpr (std::is_same_v<D, Uniform>) {
                  const auto from = static_cast<scalar_t>(distribution.from);
                  const auto to = static_cast<scalar_t>(distribution.to);
                  for (int i = part.begin; i < part.end; ++i) {
                    scalar_t& value = out[offset + i];
                    value = value == to ? from : value;
                  }
                }
              });
}

template <typename scalar_t>
void fill_integers(scalar_t* out, int64_t first, int64_t count, RandomInt distribution,
                   uint64_t seed, uint64_t draw) {
  for_batches(first, count, 2, seed, draw,
              [&](const Words& words, int blocks, int64_t batch_first) {
                const Part part = part_of(batch_first, blocks * 2, first, count);
                for (int i = part.begin; i < part.end; ++i) {
                  const uint64_t word = word64(words, i);
                  const uint64_t below = distribution.range == 0 ? word : word % distribution.range;
                  out[batch_first - first + i] = static_cast<scalar_t>(
                      static_cast<int64_t>(below + static_cast<uint64_t>(distribution.from)));
                }
              });
}

void fill_run(const at::Tensor& buffer, int64_t at, int64_t first, int64_t count,
              const Distribution& distribution, uint64_t seed, uint64_t draw) {
  AT_DISPATCH_ALL_TYPES_AND3(
      at::kHalf, at::kBFloat16, at::kBool, buffer.scalar_type(), "fill_indexed", [&] {
        scalar_t* const out = buffer.mutable_data_ptr<scalar_t>() + at;
        std::visit(
            [&](const auto& typed) {
              using D = std::decay_t<decltype(typed)>;
              if constexpr (std::is_same_v<D, RandomInt>) {
                fill_integers(out, first, count, typed, seed, draw);
              } else if constexpr (std::is_same_v<D, Random>) {
                fill_integers(out, first, count, RandomInt{0, random_range(buffer.scalar_type())},
                              seed, draw);
              } else {
                fill_reals(out, first, count, typed, seed, draw);
              }
            },
            distribution);
      });
}

}  // namespace

void fill_indexed_run(const at::Tensor& out, int64_t first, const Distribution& distribution,
                      uint64_t seed, uint64_t draw) {
  check_distribution("fill_indexed_run", distribution, out.scalar_type());
  TORCH_CHECK(out.device().is_cpu() && out.is_contiguous(), "fill_indexed_run: out is on ",
              out.device(), " with sizes ", out.sizes(), " and strides ", out.strides(),
              "; needs a contiguous tensor on the CPU");
  TORCH_CHECK(first >= 0, "fill_indexed_run: first is ", first);
  fill_run(out, 0, first, out.numel(), distribution, seed, draw);
}

void fill_indexed(const at::Tensor& local, c10::ArrayRef<int64_t> global_sizes,
                  c10::ArrayRef<ShardRange> ranges, const Distribution& distribution, uint64_t seed,
                  uint64_t draw) {
  check_distribution("fill_indexed", distribution, local.scalar_type());
  TORCH_CHECK(
      global_sizes.size() == ranges.size() && static_cast<int64_t>(ranges.size()) == local.dim(),
      "fill_indexed: a local tensor of ", local.dim(), " dims, ", ranges.size(),
      " ranges, global sizes ", global_sizes, "; needs one of each a dim");
  for (size_t d = 0; d < ranges.size(); ++d) {
    TORCH_CHECK(ranges[d].length == local.size(static_cast<int64_t>(d)) && ranges[d].offset >= 0 &&
                    ranges[d].offset + ranges[d].length <= global_sizes[d],
                "fill_indexed: dim ", d, " of the local tensor has ", local.size(d),
                " elements, its range is ", ranges[d].length, " from ", ranges[d].offset, " of ",
                global_sizes[d]);
  }
  if (local.is_meta() || local.numel() == 0) {
    return;
  }
  const bool in_place = local.device().is_cpu() && local.is_contiguous();
  const at::Tensor buffer = in_place ? local : at::empty(local.sizes(), local.scalar_type());

  // The trailing dims that are whole, and the one before them, make one run of consecutive
  // elements.
  auto run_dim = static_cast<int64_t>(ranges.size());
  int64_t run = 1;
  while (run_dim > 0) {
    --run_dim;
    run *= ranges[run_dim].length;
    if (ranges[run_dim].length != global_sizes[run_dim]) {
      break;
    }
  }
  std::vector<int64_t> at(static_cast<size_t>(run_dim), 0);  // index in the dims outside of the run
  for (int64_t done = 0; done < local.numel(); done += run) {
    int64_t first = 0;
    for (size_t d = 0; d < ranges.size(); ++d) {
      first = first * global_sizes[d] + ranges[d].offset + (d < at.size() ? at[d] : 0);
    }
    fill_run(buffer, done, first, run, distribution, seed, draw);
    for (auto d = static_cast<int64_t>(at.size()) - 1; d >= 0; --d) {
      if (++at[d] < ranges[d].length) {
        break;
      }
      at[d] = 0;
    }
  }
  if (!in_place) {
    local.copy_(buffer);
  }
}

}  // namespace ppfsdp::dtensor
