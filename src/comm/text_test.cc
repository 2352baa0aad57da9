#include "src/comm/text.h"

#include <gtest/gtest.h>

namespace ppfsdp::comm {
namespace {

using std::chrono::milliseconds;

// More than a line of an error would bury the one that says what is wrong.
TEST(Text, FirstLine) {
  EXPECT_EQ(first_line("Timed out\nframe #0: here\nframe #1: there"), "Timed out");
  EXPECT_EQ(first_line("Timed out"), "Timed out");
  EXPECT_EQ(first_line("\nframe #0: here"), "");
  EXPECT_EQ(first_line(""), "");
}

// Timeouts are told as they were set: no rounding to whole seconds, no digits without meaning.
TEST(Text, Seconds) {
  EXPECT_EQ(seconds(milliseconds(0)), "0 s");
  EXPECT_EQ(seconds(milliseconds(1)), "0.001 s");
  EXPECT_EQ(seconds(milliseconds(300)), "0.3 s");
  EXPECT_EQ(seconds(milliseconds(1500)), "1.5 s");
  EXPECT_EQ(seconds(milliseconds(300000)), "300 s");
  EXPECT_EQ(seconds(milliseconds(86400000)), "86400 s");
}

}  // namespace
}  // namespace ppfsdp::comm
