#include "src/cli/stop_signal.h"

#include <gtest/gtest.h>

#include <csignal>

namespace ppfsdp::cli {
namespace {

TEST(StopSignalTest, first_is_noted_and_second_ends_the_process) {
  const std::atomic<int>& stop = catch_stop_signals();
  EXPECT_EQ(stop.load(), 0);
  raise(SIGTERM);
  EXPECT_EQ(stop.load(), SIGTERM);
  raise(SIGINT);
  EXPECT_EQ(stop.load(), SIGINT);
  // A training that hangs must still be stoppable.
  EXPECT_EXIT(raise(SIGINT), testing::KilledBySignal(SIGINT), "");
}

}  // namespace
}  // namespace ppfsdp::cli
