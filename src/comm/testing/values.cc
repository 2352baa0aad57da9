#include "src/comm/testing/values.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <cmath>
#include <cstring>

namespace ppfsdp::comm::testing {
namespace {

/// The next of a sequence of well mixed 64-bit values (SplitMix64).
uint64_t next(uint64_t& state) {
  uint64_t x = state += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

at::Tensor make_values(at::ScalarType dtype, int64_t numel, uint64_t seed, int rank) {
  uint64_t state = seed * 1000003 + static_cast<uint64_t>(rank);
  const at::Tensor values = at::empty({numel}, at::kDouble);
  double* out = values.mutable_data_ptr<double>();
  for (int64_t i = 0; i < numel; ++i) {
    const uint64_t bits = next(state);
    if (c10::isFloatingType(dtype)) {
      // In (-2, 2), over eight binary orders of magnitude.
      const double mantissa = static_cast<double>(bits >> 11) * 0x1p-52 - 1.0;
      out[i] = std::ldexp(mantissa, 1 - static_cast<int>(bits & 7));
    } else {
      out[i] = static_cast<double>(bits % (dtype == at::kBool ? 2 : 8));
    }
  }
  return values.to(dtype);
}

std::vector<at::Tensor> make_all_values(at::ScalarType dtype, int64_t numel, uint64_t seed, int n) {
  std::vector<at::Tensor> all;
  for (int rank = 0; rank < n; ++rank) all.push_back(make_values(dtype, numel, seed, rank));
  return all;
}

std::string difference_in_bits(const at::Tensor& got, const at::Tensor& expected) {
  if (got.scalar_type() != expected.scalar_type() || got.numel() != expected.numel()) {
    return fmt::format("got {} {}, expected {} {}", got.numel(), c10::toString(got.scalar_type()),
                       expected.numel(), c10::toString(expected.scalar_type()));
  }
  const at::Tensor a = got.contiguous();
  const at::Tensor b = expected.contiguous();
  const auto* a_bytes = static_cast<const char*>(a.const_data_ptr());
  const auto* b_bytes = static_cast<const char*>(b.const_data_ptr());
  const size_t width = a.itemsize();
  if (a.numel() == 0 || std::memcmp(a_bytes, b_bytes, a.nbytes()) == 0) return "";
  for (int64_t i = 0; i < a.numel(); ++i) {
    if (std::memcmp(a_bytes + i * width, b_bytes + i * width, width) == 0) continue;
    return fmt::format("element {} of {} {}: got {:.17g}, expected {:.17g}", i, a.numel(),
                       c10::toString(a.scalar_type()), a.flatten()[i].item().toDouble(),
                       b.flatten()[i].item().toDouble());
  }
  return "";
}

}  // namespace ppfsdp::comm::testing
