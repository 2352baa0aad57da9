#include "src/cli/child_output.h"

#include <gtest/gtest.h>
#include <unistd.h>

namespace ppfsdp::cli {
namespace {

class ChildOutputTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(pipe(pipe_), 0);
    out_ = std::tmpfile();
  }
  void TearDown() override { std::fclose(out_); }

  void send(std::string_view text) {
    ASSERT_EQ(write(pipe_[1], text.data(), text.size()), static_cast<ssize_t>(text.size()));
  }

  std::string printed() {
    std::string text(static_cast<size_t>(std::ftell(out_)), '\0');
    std::rewind(out_);
    EXPECT_EQ(std::fread(text.data(), 1, text.size(), out_), text.size());
    return text;
  }

  int pipe_[2] = {-1, -1};
  std::FILE* out_ = nullptr;
};

// A line that arrives in pieces must come out once and whole.
TEST_F(ChildOutputTest, lines_are_whole_and_prefixed) {
  ChildOutput output(pipe_[0], "[3] ", out_);
  send("one\ntw");
  output.pump();
  EXPECT_EQ(printed(), "[3] one\n");
  send("o\n\nthree");
  output.pump();
  close(pipe_[1]);
  EXPECT_GE(output.descriptor(), 0);
  output.pump();
  EXPECT_EQ(output.descriptor(), -1) << "the end of the stream was not seen";
  EXPECT_EQ(printed(), "[3] one\n[3] two\n[3] \n[3] three\n");
}

// The launcher prints the one that counts; printed here too it would stand there twice.
TEST_F(ChildOutputTest, keeps_the_last_error_back) {
  ChildOutput output(pipe_[0], "", out_);
  send("fine\nppfsdp: error: first\nppfsdp: error: second\nnot an ppfsdp: error: third\n");
  close(pipe_[1]);
  output.pump();
  EXPECT_EQ(output.last_error(), "second");
  EXPECT_EQ(printed(), "fine\nnot an ppfsdp: error: third\n");
}

}  // namespace
}  // namespace ppfsdp::cli
