#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>

namespace ppfsdp::sim {

/// Fills memory that holds no valid value: NaN in floating-point and complex dtypes, the byte 0x7f
/// in all others (large for an integer, out of range for an index).
void poison(void* data, size_t bytes, c10::ScalarType dtype);

}  // namespace ppfsdp::sim
