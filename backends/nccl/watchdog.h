#pragma once

#include <atomic>
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
  /// Stops it, after it has dealt with a failure that is known.
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  void run();
  void look();
  void end_failed_rank();

  const std::shared_ptr<Endpoint> endpoint_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace ppfsdp::nccl
