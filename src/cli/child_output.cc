#include "src/cli/child_output.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace ppfsdp::cli {

ChildOutput::ChildOutput(int descriptor, std::string prefix, std::FILE* out)
    : descriptor_(descriptor), prefix_(std::move(prefix)), out_(out) {
  fcntl(descriptor_, F_SETFL, fcntl(descriptor_, F_GETFL) | O_NONBLOCK);
}

ChildOutput::ChildOutput(ChildOutput&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)),
      prefix_(std::move(other.prefix_)),
      out_(other.out_),
      partial_(std::move(other.partial_)),
      last_error_(std::move(other.last_error_)) {}

ChildOutput::~ChildOutput() {
  if (descriptor_ >= 0) close(descriptor_);
}

void ChildOutput::pump() {
  char buffer[1 << 16];
  while (descriptor_ >= 0) {
    const ssize_t got = read(descriptor_, buffer, sizeof(buffer));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) break;
    if (got <= 0) {
      if (!partial_.empty()) print(std::exchange(partial_, {}));
      close(std::exchange(descriptor_, -1));
    } else {
      take({buffer, static_cast<size_t>(got)});
    }
  }
  std::fflush(out_);
}

void ChildOutput::take(std::string_view bytes) {
  for (size_t end = 0; (end = bytes.find('\n')) != std::string_view::npos;
       bytes.remove_prefix(end + 1)) {
    partial_ += bytes.substr(0, end);
    print(std::exchange(partial_, {}));
  }
  partial_ += bytes;
}

void ChildOutput::print(std::string_view line) {
  constexpr std::string_view kError = "ppfsdp: error: ";
  if (line.starts_with(kError)) {
    last_error_ = line.substr(kError.size());
    return;
  }
  const std::string text = prefix_ + std::string(line) + "\n";
  std::fwrite(text.data(), 1, text.size(), out_);
}

}  // namespace ppfsdp::cli
