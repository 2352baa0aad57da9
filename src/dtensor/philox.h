#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <string>
#include <variant>

namespace ppfsdp::dtensor {

using PhiloxCounter = std::array<uint32_t, 4>;
using PhiloxKey = std::array<uint32_t, 2>;

/// Philox4x32 with 10 rounds, of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
/// SC11: four random words for each counter and key. Any counter can be asked for at once, which is
/// what lets a shard have its part of a tensor's values and no other.
constexpr PhiloxCounter philox4x32_10(PhiloxCounter counter, PhiloxKey key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t even = uint64_t{0xD2511F53} * counter[0];
    const uint64_t odd = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(odd >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(odd),
               static_cast<uint32_t>(even >> 32) ^ counter[3] ^ key[1],
               static_cast<uint32_t>(even)};
    key = {key[0] + 0x9E3779B9, key[1] + 0xBB67AE85};
  }
  return counter;
}

/// The counter whose low and high halves are these.
constexpr PhiloxCounter philox_counter(uint64_t low, uint64_t high) {
  return {static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high),
          static_cast<uint32_t>(high >> 32)};
}
constexpr PhiloxKey philox_key(uint64_t seed) {
  return {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
}

/// What uniform_ draws: [from, to).
struct Uniform {
  double from = 0;
  double to = 1;
};
/// What normal_ draws.
struct Normal {
  double mean = 0;
  double std = 1;
};
/// What bernoulli_(p) draws: 1 with probability p, else 0.
struct Bernoulli {
  double p = 0.5;
};
/// What exponential_ draws.
struct Exponential {
  double lambda = 1;
};
/// What random_(from, to) draws: `from` to `from + range - 1`. A range of 0 stands for 2^64.
struct RandomInt {
  int64_t from = 0;
  uint64_t range = 0;
};
/// What random_() draws: 0 to random_range(dtype) - 1.
struct Random {};

using Distribution = std::variant<Uniform, Normal, Bernoulli, Exponential, RandomInt, Random>;

/// "uniform(0, 1)".
std::string to_string(const Distribution& distribution);

/// How many values random_() without bounds draws from: 2 for bool, else up to the greatest integer
/// below which the dtype holds all of them. From TransformationHelper.h, uniform_int.
uint64_t random_range(c10::ScalarType dtype);

/// Throws, naming `function`, for parameters outside of the distribution's (from > to, std < 0, p
/// outside of [0, 1], lambda <= 0, NaN) and for a dtype that cannot hold it: uniform, normal and
/// exponential need Float, Double, Half or BFloat16, the others these, an integer or Bool.
void check_distribution(const char* function, const Distribution& distribution,
                        c10::ScalarType dtype);

}  // namespace ppfsdp::dtensor
