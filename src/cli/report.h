#pragma once

#include <exception>
#include <string>

namespace ppfsdp::cli {

/// What the process returns.
enum ExitCode : int {
  kSuccess = 0,
  kFailure = 1,               ///< training failed, or verification found a difference
  kUsage = 2,                 ///< a fault of the command line, the config or the data
  kCommunicationFailure = 3,  ///< another rank failed, did not come or does not match
  // 128 + the signal's number after SIGINT (130) and SIGTERM (143), as shells report them.
};

/// The error's message as one line, without a stack trace.
std::string one_line(const std::exception& error);

/// Prints "ppfsdp: error: ..." on standard error and returns the exit code that the error, or the
/// one it was made from, calls for.
int report(const std::exception& error);

}  // namespace ppfsdp::cli
