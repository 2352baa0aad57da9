#pragma once

#include <string>
#include <string_view>

namespace ppfsdp::train {

/// What to do with a file that is there already.
enum class IfExists { kError, kAppend, kOverwrite };
/// From "error", "append", "overwrite".
IfExists parse_if_exists(const std::string& text);

/// A file that only grows by whole records: each append is one write, so a crash of the process
/// leaves whole records (a crash of the machine may lose the last ones). A file that was made here
/// and got none is removed again at the end.
class OutputFile {
 public:
  /// Opens or makes `path` and the folders above it. Throws ConfigError, led by `key`, for a file
  /// that exists (with kError) and for one that can't be written.
  OutputFile(std::string key, std::string path, IfExists if_exists);
  ~OutputFile();
  OutputFile(OutputFile&& other) noexcept;
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  /// Throws std::runtime_error when the record can't be written (a full disk).
  void append(std::string_view record);

  const std::string& path() const { return path_; }

 private:
  std::string key_;
  std::string path_;
  int descriptor_ = -1;
  bool made_and_empty_ = false;
};

}  // namespace ppfsdp::train
