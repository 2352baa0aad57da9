// Poison shows in every dtype.
#include "sim/mesh/poison.h"

#include <ATen/ops/isnan.h>
#include <ATen/ops/min.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace ppfsdp::sim {
namespace {

TEST(Poison, is_nan_where_the_dtype_has_one) {
  for (const at::ScalarType dtype :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kComplexFloat, at::kComplexDouble}) {
    const at::Tensor tensor = at::ones({33}, dtype);
    poison(tensor.mutable_data_ptr(), tensor.nbytes());
    EXPECT_TRUE(tensor.isnan().all().item<bool>()) << dtype;
  }
  for (const at::ScalarType dtype : {at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
    const at::Tensor tensor = at::ones({33}).to(dtype);
    poison(tensor.mutable_data_ptr(), tensor.nbytes());
    EXPECT_TRUE(tensor.to(at::kFloat).isnan().all().item<bool>()) << dtype;
  }
}

TEST(Poison, is_large_in_integers) {
  for (const at::ScalarType dtype : {at::kShort, at::kInt, at::kLong}) {
    const at::Tensor tensor = at::ones({33}, dtype);
    poison(tensor.mutable_data_ptr(), tensor.nbytes());
    EXPECT_GT(tensor.min().item<int64_t>(), 0x7000) << dtype;
  }
}

// Bytes that were left out, or written behind the end, would go unnoticed in a large buffer.
TEST(Poison, fills_any_size_and_no_more) {
  for (const size_t size : {0, 1, 2, 3, 7, 64, 4095, 4096, 4097, 8191, 12291}) {
    std::vector<uint8_t> bytes(size + 8, 1);
    poison(bytes.data(), size);
    for (size_t i = 0; i < size; ++i) ASSERT_EQ(bytes[i], i % 2 == 0 ? 0xff : 0x7f) << size;
    for (size_t i = size; i < size + 8; ++i) ASSERT_EQ(bytes[i], 1) << size;
  }
}

}  // namespace
}  // namespace ppfsdp::sim
