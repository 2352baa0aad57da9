#include "src/dtensor/philox.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <cmath>
#include <limits>

namespace ppfsdp::dtensor {
namespace {

template <typename... F>
struct Overload : F... {
  using F::operator()...;
};
template <typename... F>
Overload(F...) -> Overload<F...>;

}  // namespace

std::string to_string(const Distribution& distribution) {
  return std::visit(
      Overload{
          [](const Uniform& d) { return fmt::format("uniform({}, {})", d.from, d.to); },
          [](const Normal& d) { return fmt::format("normal({}, {})", d.mean, d.std); },
          [](const Bernoulli& d) { return fmt::format("bernoulli({})", d.p); },
          [](const Exponential& d) { return fmt::format("exponential({})", d.lambda); },
          [](const RandomInt& d) { return fmt::format("{} values from {}", d.range, d.from); },
          [](const Random&) { return std::string("random()"); },
      },
      distribution);
}

uint64_t random_range(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Bool:
      return 2;
    case c10::ScalarType::Byte:
      return uint64_t{1} << 8;
    case c10::ScalarType::Char:
      return uint64_t{1} << 7;
    case c10::ScalarType::Short:
      return uint64_t{1} << 15;
    case c10::ScalarType::Int:
      return uint64_t{1} << 31;
    case c10::ScalarType::Long:
      return uint64_t{1} << 63;
    // 2 to the power of the significand's bits is the last integer that is still exact.
    case c10::ScalarType::BFloat16:
      return (uint64_t{1} << 8) + 1;
    case c10::ScalarType::Half:
      return (uint64_t{1} << 11) + 1;
    case c10::ScalarType::Float:
      return (uint64_t{1} << 24) + 1;
    case c10::ScalarType::Double:
      return (uint64_t{1} << 53) + 1;
    default:
      TORCH_CHECK(false, "random_: dtype ", dtype,
                  " has no range of its own; use Bool, an integer of up to 64 bits, Half, "
                  "BFloat16, Float or Double");
  }
}

void check_distribution(const char* function, const Distribution& distribution,
                        c10::ScalarType dtype) {
  const bool real = dtype == c10::ScalarType::Float || dtype == c10::ScalarType::Double ||
                    dtype == c10::ScalarType::Half || dtype == c10::ScalarType::BFloat16;
  const bool integer = dtype == c10::ScalarType::Bool || dtype == c10::ScalarType::Byte ||
                       dtype == c10::ScalarType::Char || dtype == c10::ScalarType::Short ||
                       dtype == c10::ScalarType::Int || dtype == c10::ScalarType::Long;
  const bool continuous = std::holds_alternative<Uniform>(distribution) ||
                          std::holds_alternative<Normal>(distribution) ||
                          std::holds_alternative<Exponential>(distribution);
  TORCH_CHECK(real || (integer && !continuous), function, ": a tensor of ", dtype,
              " cannot hold draws from ", to_string(distribution), "; use Float, Double, Half",
              continuous ? " or BFloat16" : ", BFloat16, Bool or an integer of up to 64 bits");
  std::visit(Overload{
                 [&](const Uniform& d) {
                   // Written so that a NaN fails too; an infinite bound leaves nothing to draw.
                   TORCH_CHECK(d.from <= d.to && std::isfinite(d.to - d.from), function, ": ",
                               to_string(distribution), " needs finite from <= to");
                 },
                 [&](const Normal& d) {
                   TORCH_CHECK(d.std >= 0 && !std::isnan(d.mean), function, ": ",
                               to_string(distribution), " needs std >= 0 and a mean");
                 },
                 [&](const Bernoulli& d) {
                   TORCH_CHECK(d.p >= 0 && d.p <= 1, function, ": ", to_string(distribution),
                               " needs 0 <= p <= 1");
                 },
                 [&](const Exponential& d) {
                   TORCH_CHECK(d.lambda > 0, function, ": ", to_string(distribution),
                               " needs lambda > 0");
                 },
                 [](const RandomInt&) {},
                 [](const Random&) {},
             },
             distribution);
}

}  // namespace ppfsdp::dtensor
