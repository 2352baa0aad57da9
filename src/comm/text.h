#pragma once

#include <chrono>
#include <string>

namespace ppfsdp::comm {

/// The text up to its first line break: LibTorch's errors carry a stack trace behind it.
std::string first_line(const std::string& text);

/// "5 s", "1.5 s".
std::string seconds(std::chrono::milliseconds duration);

}  // namespace ppfsdp::comm
