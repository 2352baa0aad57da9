#include "src/train/output_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <utility>

#include "src/train/config_error.h"

namespace ppfsdp::train {

IfExists parse_if_exists(const std::string& text) {
  if (text == "error") return IfExists::kError;
  if (text == "append") return IfExists::kAppend;
  if (text == "overwrite") return IfExists::kOverwrite;
  throw ConfigError(fmt::format(
      "metrics.if_exists must be \"error\", \"append\" or \"overwrite\", got \"{}\"", text));
}

OutputFile::OutputFile(std::string key, std::string path, IfExists if_exists)
    : key_(std::move(key)), path_(std::move(path)) {
  const std::filesystem::path folder = std::filesystem::path(path_).parent_path();
  std::error_code error;
  if (!folder.empty()) std::filesystem::create_directories(folder, error);
  if (error) {
    throw ConfigError(
        fmt::format("{}: cannot make the folder {}: {}", key_, folder.string(), error.message()));
  }
  int flags = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC;
  if (if_exists == IfExists::kError) flags |= O_EXCL;
  if (if_exists == IfExists::kOverwrite) flags |= O_TRUNC;
  const bool existed = std::filesystem::exists(path_, error);
  if (std::filesystem::is_directory(path_, error)) {
    throw ConfigError(fmt::format("{}: {} is a folder; name a file", key_, path_));
  }
  descriptor_ = open(path_.c_str(), flags, 0666);
  if (descriptor_ < 0 && errno == EEXIST) {
    throw ConfigError(fmt::format(
        "{}: {} exists; remove it, or set metrics.if_exists to \"append\" or \"overwrite\"", key_,
        path_));
  }
  if (descriptor_ < 0) {
    throw ConfigError(fmt::format("{}: cannot write {}: {}", key_, path_, std::strerror(errno)));
  }
  made_and_empty_ = !existed;
}

OutputFile::OutputFile(OutputFile&& other) noexcept
    : key_(std::move(other.key_)),
      path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      made_and_empty_(other.made_and_empty_) {}

OutputFile::~OutputFile() {
  if (descriptor_ < 0) return;
  close(descriptor_);
  if (made_and_empty_) unlink(path_.c_str());
}

void OutputFile::append(std::string_view record) {
  for (size_t done = 0; done < record.size();) {
    const ssize_t written = write(descriptor_, record.data() + done, record.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      throw std::runtime_error(
          fmt::format("{}: cannot write {}: {}", key_, path_, std::strerror(errno)));
    }
    made_and_empty_ = false;
    done += static_cast<size_t>(written);
  }
}

}  // namespace ppfsdp::train
