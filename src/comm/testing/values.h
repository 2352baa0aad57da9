#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace ppfsdp::comm::testing {

/// Values of a rank for a test, the same in every process: for floating-point dtypes of both signs
/// and several magnitudes, so that the order of additions shows in the sum's bits; for integers
/// small.
at::Tensor make_values(at::ScalarType dtype, int64_t numel, uint64_t seed, int rank);

/// make_values of ranks 0 to n - 1.
std::vector<at::Tensor> make_all_values(at::ScalarType dtype, int64_t numel, uint64_t seed, int n);

/// Empty if the tensors have the same dtype, size and bits; else where they differ first.
std::string difference_in_bits(const at::Tensor& got, const at::Tensor& expected);

}  // namespace ppfsdp::comm::testing
