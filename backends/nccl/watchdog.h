#pragma once

#include <memory>
#include <thread>

#include "backends/nccl/endpoint.h"

namespace ppfsdp::nccl {

/// The thread that looks after what a rank has issued while nobody else does.
///
/// An operation that is not done within the timeout of its issue, an error that a communicator
/// reports, a comparison that shows a difference, and another rank's failure (which the Reporter
/// hears of) each end this rank's communication: the reason is published to the other ranks, every
/// communicator is aborted, so that a host that waits for the device comes back, and every later
/// use throws the reason.
class Watchdog {
 public:
  explicit Watchdog(std::shared_ptr<Endpoint> endpoint);
  /// Stops it, after it has dealt with a failure that is known. Should NCCL not come back from an
  /// abort, the thread is left behind after ten seconds.
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  struct State;
  static void run(State& state);
  static void look(Endpoint& endpoint);
  static void end_failed_rank(Endpoint& endpoint);

  const std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace ppfsdp::nccl
