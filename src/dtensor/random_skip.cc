#include "src/dtensor/random_skip.h"

#include <array>
#include <bit>
#include <bitset>
#include <vector>

namespace ppfsdp::dtensor {
namespace {

constexpr int kN = at::MERSENNE_STATE_N;
constexpr int kM = at::MERSENNE_STATE_M;
constexpr int kDegree = 19937;  // 32 kN - 31: of the oldest word only the top bit is of use
constexpr int kWords = kDegree / 64 + 1;

using Words = std::array<uint32_t, kN>;
/// Over the field of two elements, of degree below kDegree: bit i is the coefficient of x^i.
using Polynomial = std::array<uint64_t, kWords>;

uint32_t twisted(uint32_t oldest, uint32_t next) {
  const uint32_t mixed = (oldest & at::UMASK) | (next & at::LMASK);
  return (mixed >> 1) ^ ((next & 1) * at::MATRIX_A);
}

/// The next kN words of the sequence.
void make_anew(Words& words) {
  for (int i = 0; i < kN - kM; ++i) {
    words[i] = words[i + kM] ^ twisted(words[i], words[i + 1]);
  }
  for (int i = kN - kM; i < kN - 1; ++i) {
    words[i] = words[i + kM - kN] ^ twisted(words[i], words[i + 1]);
  }
  words[kN - 1] = words[kM - 1] ^ twisted(words[kN - 1], words[0]);
}

/// The exponents of the characteristic polynomial, without the leading kDegree. With
/// A = x^624 + x^397, B = x^623 + x^396 and a_i the bits of the twist's constant it is
/// A (B^31 + a_0 B^30 + ... + a_30) + a_31.
const std::vector<int>& low_exponents() {
  static const std::vector<int>* exponents = [] {
    using Bits = std::bitset<kDegree + 1>;
    Bits sum(1);
    for (int i = 0; i < 31; ++i) {
      sum = (sum << (kN - 1)) ^ (sum << (kM - 1));
      sum[0] = sum[0] ^ ((at::MATRIX_A >> i) & 1);
    }
    sum = (sum << kN) ^ (sum << kM);
    sum[0] = sum[0] ^ (at::MATRIX_A >> 31);
    auto* found = new std::vector<int>;
    for (int i = 0; i < kDegree; ++i) {
      if (sum[i]) {
        found->push_back(i);
      }
    }
    return found;
  }();
  return *exponents;
}

/// Adds 64 coefficients, `word`, from x^bit on.
template <typename Array>
void add_at(Array& to, int bit, uint64_t word) {
  const int at = bit / 64;
  const int shift = bit % 64;
  to[at] ^= word << shift;
  if (shift != 0) {
    to[at + 1] ^= word >> (64 - shift);
  }
}

/// The low 32 bits of `half`, a zero before each.
uint64_t spread(uint64_t half) {
  half = (half | (half << 16)) & 0x0000FFFF0000FFFF;
  half = (half | (half << 8)) & 0x00FF00FF00FF00FF;
  half = (half | (half << 4)) & 0x0F0F0F0F0F0F0F0F;
  half = (half | (half << 2)) & 0x3333333333333333;
  return (half | (half << 1)) & 0x5555555555555555;
}

Polynomial squared(const Polynomial& p) {
  // The square of a sum is the sum of the squares here.
  std::array<uint64_t, 2 * kWords> product;
  for (int i = 0; i < kWords; ++i) {
    product[2 * i] = spread(p[i] & 0xFFFFFFFF);
    product[2 * i + 1] = spread(p[i] >> 32);
  }
  // x^kDegree is the sum of the low terms, the highest of which is 623 below it: 64 coefficients at
  // once never fall onto themselves.
  for (int i = 2 * kWords - 1; i >= kWords; --i) {
    const uint64_t word = product[i];
    product[i] = 0;
    for (const int exponent : low_exponents()) {
      add_at(product, 64 * i - kDegree + exponent, word);
    }
  }
  constexpr int kRest = kDegree % 64;
  const uint64_t word = product[kWords - 1] >> kRest;
  product[kWords - 1] &= (uint64_t{1} << kRest) - 1;
  for (const int exponent : low_exponents()) {
    add_at(product, exponent, word);
  }
  Polynomial result;
  std::copy_n(product.begin(), kWords, result.begin());
  return result;
}

void multiply_by_x(Polynomial& p) {
  for (int i = kWords - 1; i > 0; --i) {
    p[i] = (p[i] << 1) | (p[i - 1] >> 63);
  }
  p[0] <<= 1;
  constexpr uint64_t kTop = uint64_t{1} << (kDegree % 64);
  if ((p[kWords - 1] & kTop) != 0) {
    p[kWords - 1] ^= kTop;
    for (const int exponent : low_exponents()) {
      p[exponent / 64] ^= uint64_t{1} << (exponent % 64);
    }
  }
}

/// x^exponent modulo the characteristic polynomial.
Polynomial power_of_x(uint64_t exponent) {
  int bits = 0;
  while ((exponent >> bits) >= kDegree) {
    ++bits;
  }
  const uint64_t lead = exponent >> bits;
  Polynomial p{};
  p[lead / 64] = uint64_t{1} << (lead % 64);
  while (bits-- > 0) {
    p = squared(p);
    if ((exponent >> bits) & 1) {
      multiply_by_x(p);
    }
  }
  return p;
}

/// The words after making them anew `times` times, which is positive.
void jump(Words& words, uint64_t times) {
  // One step is left to the end: it is blind to the bits of the oldest word that are no part of the
  // state, and in which the sum below is not what the steps give.
  const Polynomial p = power_of_x(times * kN - 1);
  std::vector<uint32_t> sequence(kDegree + kN);
  std::copy(words.begin(), words.end(), sequence.begin());
  for (size_t i = kN; i < sequence.size(); ++i) {
    sequence[i] = sequence[i - kN + kM] ^ twisted(sequence[i - kN], sequence[i - kN + 1]);
  }
  words.fill(0);
  for (int i = 0; i < kWords; ++i) {
    for (uint64_t word = p[i]; word != 0; word &= word - 1) {
      const uint32_t* step = sequence.data() + 64 * i + std::countr_zero(word) + 1;
      for (int j = 0; j < kN; ++j) {
        words[j] ^= step[j];
      }
    }
  }
}

}  // namespace

void skip_draws(at::mt19937_data_pod& state, uint64_t count) {
  // One less than what left_ says can be drawn before the words are made anew.
  const uint64_t left = static_cast<uint64_t>(state.left_) - 1;
  if (count <= left) {
    state.left_ -= static_cast<int>(count);
    state.next_ += static_cast<uint32_t>(count);
    return;
  }
  count -= left;
  const uint64_t times = (count + kN - 1) / kN;
  const auto used = static_cast<uint32_t>(count - (times - 1) * kN);
  // Where both take the same time, about: 1.3 ms.
  constexpr uint64_t kJump = 4096;
  if (times >= kJump) {
    jump(state.state_, times);
  } else {
    for (uint64_t i = 0; i < times; ++i) {
      make_anew(state.state_);
    }
  }
  state.left_ = static_cast<int>(kN + 1 - used);
  state.next_ = used;
}

}  // namespace ppfsdp::dtensor
