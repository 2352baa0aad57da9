#include "src/comm/text.h"

#include <fmt/format.h>

namespace ppfsdp::comm {

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

std::string seconds(std::chrono::milliseconds duration) {
  return fmt::format("{:g} s", static_cast<double>(duration.count()) / 1000.0);
}

}  // namespace ppfsdp::comm
