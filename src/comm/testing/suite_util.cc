#include "src/comm/testing/suite_util.h"

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include "src/comm/testing/values.h"

namespace ppfsdp::comm::testing {

void expect_bits(const at::Tensor& got, const at::Tensor& expected, const std::string& what) {
  const std::string difference = difference_in_bits(got.cpu(), expected);
  EXPECT_TRUE(difference.empty()) << what << ": " << difference;
}

at::Tensor here(const Runtime& runtime, const at::Tensor& tensor) {
  return tensor.to(runtime.device(), tensor.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
}

at::Tensor empty_here(const Runtime& runtime, int64_t numel, at::ScalarType dtype) {
  return at::empty({numel}, at::TensorOptions(runtime.device()).dtype(dtype));
}

void finish(Runtime& runtime, Stream& stream) { runtime.compute_stream().wait(stream.record()); }

void begin(Runtime& runtime, Stream& stream) { stream.wait(runtime.compute_stream().record()); }

}  // namespace ppfsdp::comm::testing
