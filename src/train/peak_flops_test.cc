#include "src/train/peak_flops.h"

#include <gtest/gtest.h>

namespace ppfsdp::train {
namespace {

// Off by a unit or a factor of the shape it would leave what any processor does: between 10 MFLOP/s
// (under a sanitizer) and 10 TFLOP/s a core.
TEST(PeakFlopsTest, is_a_speed_that_a_processor_has) {
  const double flops = measure_peak_flops();
  EXPECT_GT(flops, 1e7);
  EXPECT_LT(flops, 1e13);
}

}  // namespace
}  // namespace ppfsdp::train
