#include "src/train/peak_flops.h"

#include <gtest/gtest.h>

#include "src/comm/single_runtime.h"

namespace ppfsdp::train {
namespace {

// Off by a unit or a factor of the shape it would leave what any processor does: between 10 MFLOP/s
// (under a sanitizer) and 10 TFLOP/s a core.
TEST(PeakFlopsTest, is_a_speed_that_a_processor_has) {
  const double flops = measure_peak_flops();
  EXPECT_GT(flops, 1e7);
  EXPECT_LT(flops, 1e13);
}

// A rank's CPU is measured as any; a device through its runtime, of which nothing is asked for but
// memory, products and the end of its stream (meta computes nothing, so its speed has no bounds).
TEST(PeakFlopsTest, is_that_of_the_runtimes_device) {
  const double flops = measure_peak_flops(*comm::make_single_runtime(), at::kBFloat16);
  EXPECT_GT(flops, 1e7);
  EXPECT_LT(flops, 1e13);
  EXPECT_GT(measure_peak_flops(*comm::make_single_runtime(c10::kMeta), at::kBFloat16), flops);
}

}  // namespace
}  // namespace ppfsdp::train
