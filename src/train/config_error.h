#pragma once

#include <stdexcept>

namespace ppfsdp::train {

/// A fault of what the user gave: a config key, a path, data that does not fit, a world that does
/// not divide the batch. `what()` is one line that names it, what was got and what would be right.
/// The binary ends with exit code 2 on it.
class ConfigError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace ppfsdp::train
