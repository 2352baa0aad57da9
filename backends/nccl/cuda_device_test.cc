#include "backends/nccl/cuda_device.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "backends/nccl/nccl.h"

namespace ppfsdp::nccl {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// On a machine without a GPU a user must read why; with one there is nothing to say.
TEST(CudaDevice, ReasonsAreOneLineAndTheFactorysToo) {
  const auto reason = why_unavailable();
  if (!reason) {
    // The caching allocator has no figures before.
    use_device(0);
    EXPECT_GT(memory_use(0).total_bytes, 0);
    EXPECT_GT(device_grid(0).multiprocessors, 0);
    EXPECT_FALSE(pci_bus_id(0).empty());
    return;
  }
  EXPECT_THAT(*reason, Not(HasSubstr("\n")));
  EXPECT_THAT(
      *reason,
      ::testing::AnyOf(HasSubstr("no NVIDIA driver is installed"), HasSubstr("driver is too old"),
                       HasSubstr("no GPU is visible"), HasSubstr("CUDA does not start")));
  try {
    make_runtime(NcclOptions{});
    FAIL() << "a runtime without a GPU";
  } catch (const c10::Error& error) {
    EXPECT_EQ(std::string(error.what_without_backtrace()), "nccl: " + *reason);
  }
}

TEST(CudaDevice, ALocalRankWithoutAGpuIsTold) {
  if (why_unavailable()) GTEST_SKIP() << "no GPU here";
  try {
    use_device(1000);
    FAIL() << "used";
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what_without_backtrace(), HasSubstr("local rank 1000 has no GPU of its own"));
  }
}

}  // namespace
}  // namespace ppfsdp::nccl
