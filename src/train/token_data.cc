#include "src/train/token_data.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>

#include "src/train/config_error.h"
#include "src/train/glob.h"

namespace ppfsdp::train {
namespace {

[[noreturn]] void fail(const std::string& path, const std::string& what) {
  throw ConfigError(fmt::format("data.files: {}: {}", path, what));
}

int64_t token_bytes(TokenType type) {
  switch (type) {
    case TokenType::kByte:
      return 1;
    case TokenType::kUint16:
      return 2;
    case TokenType::kUint32:
      return 4;
  }
  return 0;
}

/// A file opened for reading, closed at the end of scope.
class OpenFile {
 public:
  explicit OpenFile(const std::string& path) : path_(path) {
    descriptor_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (descriptor_ < 0) fail(path, std::strerror(errno));
    struct stat status {};
    if (fstat(descriptor_, &status) != 0) fail_and_close(std::strerror(errno));
    if (S_ISDIR(status.st_mode)) {
      fail_and_close("is a folder; to take the files in it write " + path + "/*");
    }
    if (!S_ISREG(status.st_mode)) fail_and_close("is not a regular file");
    size_ = status.st_size;
  }
  ~OpenFile() { close(descriptor_); }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;

  int64_t size() const { return size_; }

  std::shared_ptr<const void> map() const {
    const size_t length = static_cast<size_t>(size_);
    void* address = mmap(nullptr, length, PROT_READ, MAP_PRIVATE, descriptor_, 0);
    if (address == MAP_FAILED) {
      fail(path_, fmt::format("cannot be mapped into memory: {}", std::strerror(errno)));
    }
    return {address, [length](void* mapped) { munmap(mapped, length); }};
  }

  std::shared_ptr<const void> read_all() const {
    const std::shared_ptr<char[]> buffer(new char[static_cast<size_t>(size_)]);
    for (int64_t done = 0; done < size_;) {
      const ssize_t got =
          ::read(descriptor_, buffer.get() + done, static_cast<size_t>(size_ - done));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) fail(path_, fmt::format("cannot be read: {}", std::strerror(errno)));
      if (got == 0) fail(path_, "became shorter while it was read");
      done += got;
    }
    return buffer;
  }

 private:
  [[noreturn]] void fail_and_close(const std::string& what) {
    close(descriptor_);
    fail(path_, what);
  }

  std::string path_;
  int descriptor_ = -1;
  int64_t size_ = 0;
};

}  // namespace

TokenData::TokenData(const std::vector<std::string>& patterns, TokenType type) : type_(type) {
  std::vector<std::string> paths;
  for (const std::string& pattern : patterns) {
    if (pattern.empty()) throw ConfigError("data.files: a path is empty");
    const std::vector<std::string> found = expand_glob(pattern);
    if (found.empty()) fail(pattern, "no file matches");
    paths.insert(paths.end(), found.begin(), found.end());
  }
  std::sort(paths.begin(), paths.end());
  paths.erase(std::unique(paths.begin(), paths.end()), paths.end());
  if (paths.empty()) throw ConfigError("data.files: names no file");
  for (const std::string& path : paths) append(path);
  if (size_ == 0) {
    fail(paths.front(), paths.size() == 1
                            ? "is empty"
                            : fmt::format("and the other {} files are empty", paths.size() - 1));
  }
}

void TokenData::append(const std::string& path) {
  const OpenFile file(path);
  const int64_t bytes = token_bytes(type_);
  if (file.size() == 0) {
    // Trees of source text hold empty files; an array of no tokens is a mistake.
    if (type_ == TokenType::kByte) return;
    fail(path, "is empty");
  }
  if (file.size() % bytes != 0) {
    fail(path,
         fmt::format("has {} bytes, which is not a whole number of {}-byte tokens (data.dtype "
                     "= \"uint{}\")",
                     file.size(), bytes, 8 * bytes));
  }
  Part part;
  part.path = path;
  part.owner = type_ == TokenType::kByte ? file.read_all() : file.map();
  part.data = static_cast<const unsigned char*>(part.owner.get());
  part.first = size_;
  part.count = file.size() / bytes;
  size_ += part.count;
  parts_.push_back(std::move(part));
}

std::vector<std::string> TokenData::paths() const {
  std::vector<std::string> paths;
  for (const Part& part : parts_) paths.push_back(part.path);
  return paths;
}

void TokenData::read(int64_t first, int64_t count, int64_t vocab, int64_t* out) const {
  // The last part that starts at or before `first`.
  auto part = std::upper_bound(parts_.begin(), parts_.end(), first,
                               [](int64_t index, const Part& p) { return index < p.first; }) -
              1;
  const int64_t bytes = token_bytes(type_);
  for (int64_t done = 0; done < count; ++part) {
    const int64_t begin = first + done - part->first;
    const int64_t here = std::min(count - done, part->count - begin);
    for (int64_t i = begin; i < begin + here; ++i, ++done) {
      int64_t id = 0;
      for (int64_t byte = bytes - 1; byte >= 0; --byte) {
        id = id << 8 | part->data[i * bytes + byte];
      }
      if (id >= vocab) {
        fail(part->path,
             fmt::format("token {} at index {} (byte {}) is not below the vocabulary of "
                         "{} (model.vocab)",
                         id, i, i * bytes, vocab));
      }
      out[done] = id;
    }
  }
}

std::string libtorch_headers_glob() {
  std::string library;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* found) {
        const std::filesystem::path path(info->dlpi_name);
        if (path.filename() != "libtorch_cpu.so") return 0;
        *static_cast<std::string*>(found) = path.string();
        return 1;
      },
      &library);
  std::error_code error;
  // Where Bazel runs it the library is a link into LibTorch's folder.
  const std::filesystem::path real = std::filesystem::canonical(library, error);
  const std::filesystem::path headers = real.parent_path().parent_path() / "include" / "torch";
  if (error || !std::filesystem::is_directory(headers, error)) {
    throw ConfigError(
        "data.files: LibTorch's headers, the default text, are not beside its library "
        "(libtorch_cpu.so); name text files instead");
  }
  return (headers / "**" / "*.h").string();
}

}  // namespace ppfsdp::train
