#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "src/comm/runtime.h"

namespace ppfsdp::comm::testing {

/// A test failure that says where the bits differ, if they do; `got` may be on any device.
void expect_bits(const at::Tensor& got, const at::Tensor& expected, const std::string& what);

/// `tensor`, made on the CPU, in memory of its own where the runtime's operations take it.
at::Tensor here(const Runtime& runtime, const at::Tensor& tensor);

/// Without values, likewise.
at::Tensor empty_here(const Runtime& runtime, int64_t numel, at::ScalarType dtype);

/// Lets the rank read what its stream has written.
void finish(Runtime& runtime, Stream& stream);

/// A tensor for the rank's own use on `stream`: what the rank did before comes before.
void begin(Runtime& runtime, Stream& stream);

}  // namespace ppfsdp::comm::testing
