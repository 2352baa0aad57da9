#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace ppfsdp::train {

/// How a file holds its tokens.
enum class TokenType {
  kByte,    ///< text: one token a byte; read into memory
  kUint16,  ///< little-endian ids, mapped into memory
  kUint32,
};

/// The tokens of some files, joined in the bytewise order of their paths into one sequence.
///
/// Files must not change while they are open. Safe to read from several threads.
class TokenData {
 public:
  /// `patterns` as expand_glob takes them; a file matched twice counts once. Throws ConfigError
  /// that names the pattern or file: no match, not there, a folder, empty (an empty text file is
  /// passed over while another has text), a length that is not a whole number of tokens.
  TokenData(const std::vector<std::string>& patterns, TokenType type);

  /// Number of tokens.
  int64_t size() const { return size_; }
  /// The files, in order.
  std::vector<std::string> paths() const;

  /// Writes tokens [first, first + count) to `out`. Throws ConfigError that names file and position
  /// of an id that is not below `vocab`.
  void read(int64_t first, int64_t count, int64_t vocab, int64_t* out) const;

 private:
  struct Part {
    std::string path;
    std::shared_ptr<const void> owner;
    const unsigned char* data;
    int64_t first;  ///< index of its first token in the whole
    int64_t count;
  };

  void append(const std::string& path);

  TokenType type_;
  std::vector<Part> parts_;
  int64_t size_ = 0;
};

/// The glob of the C++ headers that belong to the LibTorch this process has loaded: real text that
/// every machine that runs this has. ConfigError when they are not beside the library.
std::string libtorch_headers_glob();

}  // namespace ppfsdp::train
