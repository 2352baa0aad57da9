#include "src/train/sampler.h"

#include <fmt/format.h>

#include "src/train/config_error.h"

namespace ppfsdp::train {
namespace {

/// SplitMix64's output function (Steele, Lea, Flood 2014): a bijection that avalanches.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace

Sampler::Sampler(int64_t tokens, int64_t seq_len, uint64_t seed)
    : seq_len_(seq_len), seed_(seed), windows_((tokens - 1) / seq_len) {
  if (windows_ < 1) {
    throw ConfigError(fmt::format(
        "data.files: {} tokens are too few for one sequence: data.seq_len = {} needs {}", tokens,
        seq_len, seq_len + 1));
  }
  half_bits_ = 1;
  while (half_bits_ < 31 && (int64_t{1} << (2 * half_bits_)) < windows_) ++half_bits_;
}

int64_t Sampler::offset(int64_t sequence) const {
  const uint64_t epoch = static_cast<uint64_t>(sequence / windows_);
  const uint64_t key = mix(mix(seed_) ^ epoch);
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  uint64_t index = static_cast<uint64_t>(sequence % windows_);
  // The network permutes [0, 4^half_bits), at most four times the windows; walking on until an
  // index is in range makes of it a permutation of the windows.
  do {
    uint64_t left = index >> half_bits_;
    uint64_t right = index & mask;
    for (uint64_t round = 0; round < 4; ++round) {
      const uint64_t next = left ^ (mix(key ^ mix(round << 32 | right)) & mask);
      left = right;
      right = next;
    }
    index = left << half_bits_ | right;
  } while (index >= static_cast<uint64_t>(windows_));
  return static_cast<int64_t>(index) * seq_len_;
}

}  // namespace ppfsdp::train
