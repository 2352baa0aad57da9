#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ppfsdp::train {

/// How far two float32 tensors are apart, element by element.
struct TensorDifference {
  /// The first element, counted row by row, whose bits differ; none when the tensors are equal bit
  /// for bit (which NaNs of one pattern are, and 0 and -0 are not).
  std::optional<int64_t> first;
  /// Largest number of float32 steps between two elements; between a NaN and a number it is
  /// UINT32_MAX.
  uint64_t max_ulps = 0;
  /// Largest magnitude of a difference; infinity between a NaN and a number.
  double max_abs = 0;
};

/// Throws unless both are float32 on the CPU and of one shape.
TensorDifference compare_bits(const at::Tensor& got, const at::Tensor& expected);

/// The rank whose shard of `tensor` (a DTensor, or a plain tensor, which is rank 0's) holds element
/// `index` of the whole, counted row by row.
int rank_of_element(const at::Tensor& tensor, int64_t index);

/// "[5, 7]": element `index` of a tensor of these sizes, by its coordinates.
std::string coordinates(c10::ArrayRef<int64_t> sizes, int64_t index);

}  // namespace ppfsdp::train
