#pragma once

#include <array>
#include <cstdint>

namespace ppfsdp::optim {

/// A binary floating-point format to round to: IEEE's, subnormals included.
struct FloatFormat {
  int digits;   ///< of the significand, at most 53
  int lowest;   ///< exponent of the least subnormal
  int highest;  ///< values from 2^highest on are infinite
};
inline constexpr FloatFormat kFloat32 = {24, -149, 128};
inline constexpr FloatFormat kFloat64 = {53, -1074, 1024};

/// A sum that is never rounded: a fixed-point number with places for all bits from those of the
/// square of the least double to those of 2^63 squares of the greatest. So it does not depend on
/// the order in which values were added, nor on how they were shared out over sums that were added
/// up in the end.
///
/// The number is held as digits of 32 bits in words of 64, so that it takes 2^29 additions before
/// a carry has to be moved, and so that the words of several sums may be added up word by word:
/// an all-reduce of integers adds the ranks' sums, exactly and in any order. The sum as a whole
/// must not be negative, which is enough for powers of magnitudes; single values may be.
class ExactSum {
 public:
  /// Least exponent of a bit that can be held. 2 * -1074 = -2148, rounded down to a digit.
  static constexpr int kLowest = -2176;
  static constexpr int kDigits = 136;
  static constexpr int kWords = kDigits + 2;

  /// Adds value * 2^exponent, which has to lie between the bounds above.
  void add(int64_t value, int exponent) {
    const int place = exponent - kLowest;
    const __int128 wide = static_cast<__int128>(value) << (place % 32);
    int64_t* const digit = &digits_[place / 32];
    digit[0] += static_cast<uint32_t>(wide);
    digit[1] += static_cast<uint32_t>(wide >> 32);
    digit[2] += static_cast<int64_t>(wide >> 64);
    if (++additions_ >= kMostAdditions) carry();
  }

  /// Adds a value; one that is infinite (of either sign) or NaN makes the sum so. NaN wins.
  void add(double value);
  /// Adds value * value, exactly.
  void add_square(double value);
  void add(const ExactSum& other);

  /// The sum, rounded once: to the nearest value of the format, ties to even.
  double value(const FloatFormat& format) const;
  /// The square root of the sum, rounded once in the same way.
  double root(const FloatFormat& format) const;

  /// Writes the sum as kWords integers. The sums, word by word, of those of up to 2^30 ExactSums
  /// are the words of their sum.
  void store(int64_t* words) const;
  static ExactSum load(const int64_t* words);

 private:
  /// What a digit may hold beyond its 32 bits: 2^29 additions and as many again of another sum.
  static constexpr int64_t kMostAdditions = int64_t{1} << 29;

  /// The 64 leading bits of a number that is not 0, and whether any further bit is set.
  struct Leading {
    uint64_t bits = 0;  ///< the uppermost is set
    int exponent = 0;   ///< of the lowest bit
    bool more = false;
  };

  /// Brings all digits but the last into [0, 2^32).
  void carry();
  static double rounded(const Leading& leading, const FloatFormat& format);
  /// The 128 leading bits, the exponent of the lowest, and whether there are more; 0 for no sum.
  unsigned __int128 leading_bits(int& exponent, bool& more) const;

  std::array<int64_t, kDigits> digits_ = {};
  int64_t additions_ = 0;
  int64_t nans_ = 0;
  int64_t infinities_ = 0;
};

}  // namespace ppfsdp::optim
