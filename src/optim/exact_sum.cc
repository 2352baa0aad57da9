#include "src/optim/exact_sum.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace ppfsdp::optim {
namespace {

constexpr int kDigitBits = 32;
constexpr uint64_t kDigitMask = 0xffffffff;

/// A finite double as significand * 2^exponent.
struct Parts {
  int64_t significand;
  int exponent;
};

Parts parts_of(double value) {
  const uint64_t bits = std::bit_cast<uint64_t>(value);
  const int field = static_cast<int>(bits >> 52) & 0x7ff;
  auto significand = static_cast<int64_t>(bits & ((uint64_t{1} << 52) - 1));
  significand += field == 0 ? 0 : int64_t{1} << 52;
  return {bits >> 63 == 0 ? significand : -significand, std::max(field, 1) - 1075};
}

/// The greatest integer whose square is at most `value`, which is at least 2^126.
uint64_t integer_root(unsigned __int128 value) {
  // A root to 53 bits; one step of Newton's from it is off by one at most.
  const double guess = std::sqrt(static_cast<double>(value));
  auto root = static_cast<unsigned __int128>(guess);
  root = (root + value / root) / 2;
  constexpr unsigned __int128 kMost = ~uint64_t{0};
  root = std::min(root, kMost);
  while (root * root > value) --root;
  while (root < kMost && (root + 1) * (root + 1) <= value) ++root;
  return static_cast<uint64_t>(root);
}

}  // namespace

void ExactSum::add(double value) {
  if (std::isnan(value)) {
    ++nans_;
  } else if (std::isinf(value)) {
    ++infinities_;
  } else {
    const Parts parts = parts_of(value);
    add(parts.significand, parts.exponent);
  }
}

void ExactSum::add_square(double value) {
  if (!std::isfinite(value)) return add(std::abs(value));
  const Parts parts = parts_of(std::abs(value));
  constexpr int kLow = 27;
  const int64_t high = parts.significand >> kLow;
  const int64_t low = parts.significand & ((int64_t{1} << kLow) - 1);
  add(high * high, 2 * parts.exponent + 2 * kLow);
  add(high * low, 2 * parts.exponent + kLow + 1);
  add(low * low, 2 * parts.exponent);
}

void ExactSum::add(const ExactSum& other) {
  for (int i = 0; i < kDigits; ++i) digits_[i] += other.digits_[i];
  nans_ += other.nans_;
  infinities_ += other.infinities_;
  additions_ += other.additions_ + 1;
  if (additions_ >= kMostAdditions) carry();
}

void ExactSum::carry() {
  int64_t carried = 0;
  for (int i = 0; i + 1 < kDigits; ++i) {
    const int64_t digit = digits_[i] + carried;
    carried = digit >> kDigitBits;  // towards minus infinity
    digits_[i] = digit & static_cast<int64_t>(kDigitMask);
  }
  digits_[kDigits - 1] += carried;
  additions_ = 0;
}

unsigned __int128 ExactSum::leading_bits(int& exponent, bool& more) const {
  ExactSum sum = *this;
  sum.carry();
  const auto digit = [&](int i) {
    return i < 0 ? uint64_t{0} : static_cast<uint64_t>(sum.digits_[i]);
  };
  int top = kDigits - 1;
  while (top >= 0 && digit(top) == 0) --top;
  if (top < 0) return 0;
  unsigned __int128 bits = 0;
  for (int i = 0; i < 4; ++i) bits = bits << kDigitBits | digit(top - i);
  const int shift = std::countl_zero(static_cast<uint32_t>(digit(top)));
  const uint64_t next = digit(top - 4) << shift;
  bits = bits << shift | next >> kDigitBits;
  more = (next & kDigitMask) != 0;
  for (int i = 0; i < top - 4; ++i) more = more || digit(i) != 0;
  exponent = kLowest + kDigitBits * (top - 3) - shift;
  return bits;
}

double ExactSum::rounded(const Leading& leading, const FloatFormat& format) {
  const int kept_exponent = std::max(leading.exponent + 64 - format.digits, format.lowest);
  const int dropped = kept_exponent - leading.exponent;
  if (dropped > 64) return 0;  // less than half of the least value
  uint64_t kept = dropped == 64 ? 0 : leading.bits >> dropped;
  const uint64_t half = uint64_t{1} << (dropped - 1);
  const uint64_t rest = leading.bits & (half | (half - 1));
  if (rest > half || (rest == half && (leading.more || kept % 2 == 1))) ++kept;
  const double value = std::ldexp(static_cast<double>(kept), kept_exponent);
  return value < std::ldexp(1.0, format.highest - 1) * 2 ? value
                                                         : std::numeric_limits<double>::infinity();
}

double ExactSum::value(const FloatFormat& format) const {
  if (nans_ > 0) return std::numeric_limits<double>::quiet_NaN();
  if (infinities_ > 0) return std::numeric_limits<double>::infinity();
  int exponent = 0;
  bool more = false;
  const unsigned __int128 bits = leading_bits(exponent, more);
  if (bits == 0) return 0;
  more = more || static_cast<uint64_t>(bits) != 0;
  return rounded({static_cast<uint64_t>(bits >> 64), exponent + 64, more}, format);
}

double ExactSum::root(const FloatFormat& format) const {
  if (nans_ > 0) return std::numeric_limits<double>::quiet_NaN();
  if (infinities_ > 0) return std::numeric_limits<double>::infinity();
  int exponent = 0;
  bool more = false;
  unsigned __int128 bits = leading_bits(exponent, more);
  if (bits == 0) return 0;
  if (exponent % 2 != 0) {
    more = more || (bits & 1) != 0;
    bits >>= 1;
    ++exponent;
  }
  // Bits that were cut off can't raise the root to the next integer.
  const uint64_t root = integer_root(bits);
  more = more || static_cast<unsigned __int128>(root) * root != bits;
  return rounded({root, exponent / 2, more}, format);
}

void ExactSum::store(int64_t* words) const {
  ExactSum sum = *this;
  sum.carry();
  words[0] = sum.nans_;
  words[1] = sum.infinities_;
  std::copy(sum.digits_.begin(), sum.digits_.end(), words + 2);
}

ExactSum ExactSum::load(const int64_t* words) {
  ExactSum sum;
  sum.nans_ = words[0];
  sum.infinities_ = words[1];
  std::copy(words + 2, words + kWords, sum.digits_.begin());
  sum.carry();
  return sum;
}

}  // namespace ppfsdp::optim
