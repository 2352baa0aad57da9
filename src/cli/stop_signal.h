#pragma once

#include <atomic>

namespace ppfsdp::cli {

/// From now on the first SIGINT or SIGTERM stores its number in the flag that is returned (0
/// before) and lets the program go on, so that it can end cleanly; a second one of its kind ends
/// the process at once.
const std::atomic<int>& catch_stop_signals();

}  // namespace ppfsdp::cli
