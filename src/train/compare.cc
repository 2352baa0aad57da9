#include "src/train/compare.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "src/dtensor/dtensor.h"
#include "src/dtensor/placement.h"
#include "src/mesh/device_mesh.h"

namespace ppfsdp::train {
namespace {

/// The floats in order as integers: neighbours differ by one, and 0 and -0 are the same.
int64_t ordinal(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const int64_t magnitude = bits & 0x7fffffffu;
  return (bits & 0x80000000u) != 0 ? -magnitude : magnitude;
}

}  // namespace

TensorDifference compare_bits(const at::Tensor& got, const at::Tensor& expected) {
  for (const at::Tensor* tensor : {&got, &expected}) {
    TORCH_CHECK(tensor->scalar_type() == at::kFloat && tensor->is_cpu(),
                "compare_bits: tensors must be float32 on the CPU, got ", tensor->toString());
  }
  TORCH_CHECK(got.sizes() == expected.sizes(), "compare_bits: sizes ", got.sizes(), " and ",
              expected.sizes(), " must be equal");
  const at::Tensor a = got.contiguous(), b = expected.contiguous();
  const float* x = a.const_data_ptr<float>();
  const float* y = b.const_data_ptr<float>();
  TensorDifference difference;
  for (int64_t i = 0; i < a.numel(); ++i) {
    if (std::bit_cast<uint32_t>(x[i]) == std::bit_cast<uint32_t>(y[i])) continue;
    if (!difference.first) difference.first = i;
    if (std::isnan(x[i]) != std::isnan(y[i])) {
      difference.max_ulps = std::numeric_limits<uint32_t>::max();
      difference.max_abs = std::numeric_limits<double>::infinity();
    } else if (!std::isnan(x[i])) {
      const uint64_t ulps = static_cast<uint64_t>(std::abs(ordinal(x[i]) - ordinal(y[i])));
      difference.max_ulps = std::max(difference.max_ulps, ulps);
      difference.max_abs = std::max(
          difference.max_abs, std::abs(static_cast<double>(x[i]) - static_cast<double>(y[i])));
    }
  }
  return difference;
}

int rank_of_element(const at::Tensor& tensor, int64_t index) {
  if (!dtensor::is_dtensor(tensor)) return 0;
  const dtensor::SpecPtr& spec = dtensor::spec_of(tensor);
  const dtensor::Placement& placement = spec->placements.front();
  if (!placement.is_shard()) return 0;
  const auto dim = static_cast<size_t>(placement.dim());
  int64_t inner = 1;
  for (size_t d = dim + 1; d < spec->sizes.size(); ++d) inner *= spec->sizes[d];
  const int64_t position = index / inner % spec->sizes[dim];
  const int64_t count = spec->mesh->size(0);
  for (int64_t rank = 0; rank < count; ++rank) {
    const dtensor::ShardRange range = dtensor::shard_range(spec->sizes[dim], count, rank);
    if (position < range.offset + range.length) return static_cast<int>(rank);
  }
  return static_cast<int>(count - 1);
}

std::string coordinates(c10::ArrayRef<int64_t> sizes, int64_t index) {
  std::vector<int64_t> position(sizes.size());
  for (size_t d = sizes.size(); d-- > 0; index /= sizes[d]) position[d] = index % sizes[d];
  return fmt::format("[{}]", fmt::join(position, ", "));
}

}  // namespace ppfsdp::train
