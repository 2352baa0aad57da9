#pragma once

#include <cstddef>

namespace ppfsdp::sim {

/// Fills memory that holds no valid value with the bytes ff 7f ff 7f ...: a NaN in every dtype that
/// has one, a large value in integers of 16 bits and more (as an index out of range). `data` is
/// aligned for its dtype.
void poison(void* data, size_t bytes);

}  // namespace ppfsdp::sim
