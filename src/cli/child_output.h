#pragma once

#include <cstdio>
#include <string>
#include <string_view>

namespace ppfsdp::cli {

/// Passes on what a child process writes to one of its streams: whole lines, each led by the
/// child's prefix, in one write, so that the lines of several children never mix. The error line
/// that a child ends with is kept back: of all children's only the one that counts is shown.
class ChildOutput {
 public:
  /// Reads from `descriptor`, which it closes, and writes to `out`.
  ChildOutput(int descriptor, std::string prefix, std::FILE* out);
  ~ChildOutput();
  ChildOutput(ChildOutput&& other) noexcept;
  ChildOutput(const ChildOutput&) = delete;
  ChildOutput& operator=(const ChildOutput&) = delete;

  /// Passes on what can be read without waiting. At the stream's end a last line without a newline
  /// gets one.
  void pump();

  /// The descriptor to poll; -1 after the stream's end.
  int descriptor() const { return descriptor_; }

  /// The rest of the last line that began with "ppfsdp: error: "; empty if none did.
  const std::string& last_error() const { return last_error_; }

 private:
  void take(std::string_view bytes);
  void print(std::string_view line);

  int descriptor_;
  std::string prefix_;
  std::FILE* out_;
  std::string partial_;
  std::string last_error_;
};

}  // namespace ppfsdp::cli
