#pragma once

#include <exception>
#include <string>

namespace ppfsdp::cli {

/// What the process returns.
enum ExitCode : int {
  kSuccess = 0,
  kFailure = 1,  ///< training failed, or verification found a difference
  kUsage = 2,    ///< a fault of the command line, the config or the data
  /// Between `launch` and its ranks alone: another rank failed, did not come or does not match, so
  /// the cause is likely elsewhere. Everybody else is told kFailure.
  kOtherRankFailed = 3,
  // 128 + the signal's number after SIGINT (130) and SIGTERM (143), as shells report them.
};

/// The error's message as one line, without a stack trace and without what would steer a terminal.
std::string one_line(const std::exception& error);

/// Prints "ppfsdp: error: ..." on standard error and returns the exit code that the error, or the
/// one it was made from, calls for.
int report(const std::exception& error);

/// Lets LibTorch print nothing but what ends the process: its sockets would put warnings and errors
/// with stack traces round the one line that reports what went wrong. Who wants them sets
/// TORCH_CPP_LOG_LEVEL.
void quieten_libtorch();

}  // namespace ppfsdp::cli
