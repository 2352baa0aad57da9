#include "src/cli/report.h"

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>

#include "backends/start/launcher.h"
#include "src/comm/communicator.h"
#include "src/train/config_error.h"

namespace ppfsdp::cli {
namespace {

int exit_code_of(const std::exception& error) {
  if (dynamic_cast<const train::ConfigError*>(&error) != nullptr) return kUsage;
  // The simulated mesh throws a rank's error on with the rank's name, the original inside.
  try {
    std::rethrow_if_nested(error);
  } catch (const std::exception& original) {
    return exit_code_of(original);
  } catch (...) {
    return kFailure;
  }
  const bool launched = std::getenv(start::kLaunchedVariable) != nullptr;
  const bool other_rank = dynamic_cast<const comm::CommError*>(&error) != nullptr;
  return launched && other_rank ? kOtherRankFailed : kFailure;
}

}  // namespace

std::string one_line(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  const std::string text =
      torch_error != nullptr ? torch_error->what_without_backtrace() : error.what();
  // Line breaks become one space, with the blanks around them.
  std::string line;
  bool broken = false;
  for (const char c : text) {
    if (c == '\n') {
      broken = true;
      while (!line.empty() && line.back() == ' ') line.pop_back();
    } else if (!broken || c != ' ') {
      if (broken && !line.empty()) line += ' ';
      broken = false;
      const auto byte = static_cast<unsigned char>(c);
      line += byte < 0x20 || byte == 0x7f ? fmt::format("\\x{:02x}", byte) : std::string(1, c);
    }
  }
  return line;
}

void quieten_libtorch() {
  if (std::getenv("TORCH_CPP_LOG_LEVEL") != nullptr) {
    c10::initLogging();
  } else {
    FLAGS_caffe2_log_level = c10::GLOG_FATAL;
  }
}

int report(const std::exception& error) {
  // One write: the lines of several processes must not mix.
  const std::string line = "ppfsdp: error: " + one_line(error) + "\n";
  std::fputs(line.c_str(), stderr);
  std::fflush(stderr);
  return exit_code_of(error);
}

}  // namespace ppfsdp::cli
