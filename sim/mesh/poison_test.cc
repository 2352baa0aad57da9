// Poison shows in every dtype.
#include "sim/mesh/poison.h"

#include <ATen/ops/isnan.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <cstdint>

namespace ppfsdp::sim {
namespace {

TEST(Poison, is_nan_where_the_dtype_has_one) {
  for (const at::ScalarType dtype :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kComplexFloat, at::kComplexDouble}) {
    const at::Tensor tensor = at::ones({33}, dtype);
    poison(tensor.mutable_data_ptr(), tensor.nbytes(), dtype);
    EXPECT_TRUE(tensor.isnan().all().item<bool>()) << dtype;
  }
  for (const at::ScalarType dtype : {at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
    const at::Tensor tensor = at::ones({33}).to(dtype);
    poison(tensor.mutable_data_ptr(), tensor.nbytes(), dtype);
    EXPECT_TRUE(tensor.to(at::kFloat).isnan().all().item<bool>()) << dtype;
  }
}

TEST(Poison, is_a_pattern_elsewhere) {
  for (const at::ScalarType dtype : {at::kByte, at::kShort, at::kInt, at::kLong, at::kBool}) {
    const at::Tensor tensor = at::ones({33}, dtype);
    poison(tensor.mutable_data_ptr(), tensor.nbytes(), dtype);
    const auto* bytes = static_cast<const uint8_t*>(tensor.const_data_ptr());
    for (size_t i = 0; i < tensor.nbytes(); ++i) EXPECT_EQ(bytes[i], 0x7f) << dtype;
  }
}

}  // namespace
}  // namespace ppfsdp::sim
