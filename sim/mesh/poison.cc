#include "sim/mesh/poison.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstring>
#include <limits>

namespace ppfsdp::sim {
namespace {

template <typename T>
void fill_nan(void* data, size_t bytes) {
  std::fill_n(static_cast<T*>(data), bytes / sizeof(T), std::numeric_limits<T>::quiet_NaN());
}

}  // namespace

void poison(void* data, size_t bytes, c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Float:
    case c10::ScalarType::ComplexFloat:
      return fill_nan<float>(data, bytes);
    case c10::ScalarType::Double:
    case c10::ScalarType::ComplexDouble:
      return fill_nan<double>(data, bytes);
    case c10::ScalarType::Half:
    case c10::ScalarType::ComplexHalf:
      return fill_nan<c10::Half>(data, bytes);
    case c10::ScalarType::BFloat16:
      return fill_nan<c10::BFloat16>(data, bytes);
    default:
      // Also a NaN in the 8-bit float dtypes that have one (float8_e4m3fn and float8_e5m2: 0x7f).
      std::memset(data, 0x7f, bytes);
  }
}

}  // namespace ppfsdp::sim
