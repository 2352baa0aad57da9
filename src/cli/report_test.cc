#include "src/cli/report.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "backends/start/launcher.h"
#include "src/comm/communicator.h"
#include "src/train/config_error.h"

namespace ppfsdp::cli {
namespace {

TEST(ReportTest, one_line_without_a_stack_trace) {
  EXPECT_EQ(one_line(std::runtime_error("a\nb \n\n c\n")), "a b c");
  // A name in a config file must not clear the user's screen.
  EXPECT_EQ(one_line(std::runtime_error("a\x1b[2Jb\r")), "a\\x1b[2Jb\\x0d");
  try {
    TORCH_CHECK(false, "what was got\nand what is right");
  } catch (const c10::Error& error) {
    EXPECT_EQ(one_line(error), "what was got and what is right");
  }
}

TEST(ReportTest, exit_code_says_whose_fault_it_is) {
  testing::internal::CaptureStderr();
  EXPECT_EQ(report(train::ConfigError("x")), kUsage);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "ppfsdp: error: x\n");
  testing::internal::CaptureStderr();
  EXPECT_EQ(report(std::runtime_error("x")), kFailure);
  EXPECT_EQ(report(comm::CommError("x")), kFailure);
  // launch must be able to tell the rank that failed from those that noticed.
  setenv(start::kLaunchedVariable, "1", 1);
  EXPECT_EQ(report(comm::CommError("x")), kOtherRankFailed);
  EXPECT_EQ(report(std::runtime_error("x")), kFailure);
  unsetenv(start::kLaunchedVariable);
  testing::internal::GetCapturedStderr();
}

// The simulated mesh wraps a rank's error; a config's fault must still end with the code of one.
TEST(ReportTest, nested_original_decides) {
  testing::internal::CaptureStderr();
  try {
    try {
      throw train::ConfigError("token 300");
    } catch (...) {
      std::throw_with_nested(std::runtime_error("rank 2: token 300"));
    }
  } catch (const std::exception& error) {
    EXPECT_EQ(report(error), kUsage);
  }
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "ppfsdp: error: rank 2: token 300\n");
}

}  // namespace
}  // namespace ppfsdp::cli
