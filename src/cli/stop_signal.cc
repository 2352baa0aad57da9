#include "src/cli/stop_signal.h"

#include <csignal>

namespace ppfsdp::cli {
namespace {

std::atomic<int> stop_signal{0};
static_assert(std::atomic<int>::is_always_lock_free, "a signal handler writes it");

void on_signal(int number) { stop_signal.store(number); }

}  // namespace

const std::atomic<int>& catch_stop_signals() {
  struct sigaction action = {};
  action.sa_handler = on_signal;
  // Reads and writes in progress go on; the second signal finds the default action.
  action.sa_flags = SA_RESTART | static_cast<int>(SA_RESETHAND);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  return stop_signal;
}

}  // namespace ppfsdp::cli
