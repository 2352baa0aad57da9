#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include "backends/nccl/nccl.h"

namespace ppfsdp::nccl {
namespace {

// A user of the CPU build must learn what to do, not see a missing symbol or a crash.
TEST(Absent, TheCpuBuildSaysHowToGetTheBackend) {
  ASSERT_TRUE(why_unavailable().has_value());
  EXPECT_EQ(*why_unavailable(), "this binary was built without CUDA: build it with --config=cuda");
  try {
    make_runtime({});
    FAIL() << "a runtime without CUDA";
  } catch (const c10::Error& error) {
    EXPECT_EQ(std::string(error.what_without_backtrace()), "nccl: " + *why_unavailable());
  }
}

}  // namespace
}  // namespace ppfsdp::nccl
