#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "backends/start/meeting.h"
#include "src/comm/runtime.h"

namespace ppfsdp::nccl {

/// `timeout` is for the rendezvous and for every operation, from its issue to its end on the GPU.
struct NcclOptions : start::MeetingOptions {
  /// Which of this machine's visible GPUs is this rank's.
  int local_rank = 0;
  /// Collectives whose calls the ranks compare with each other before anything moves: the first
  /// `checked` of each group (and messages of each pair of ranks), at the cost of a wait of the
  /// host each. Then one in 64 is compared without a wait; 0 compares none. A mismatch is an error
  /// on every rank that says which rank differs, for calls that are not compared a timeout at best.
  uint64_t checked = 256;
  /// Is told in a line how the rank's threads were bound to the CPUs near its GPU. May be null.
  std::function<void(const std::string& line)> log;

  /// From the variables of the launcher that started this process (see start::read_launcher); an
  /// error names the variable that is missing or wrong, and what would be right.
  static NcclOptions from_environment();
};

/// Why no rank of this backend can run in this process, in one line: the binary was built without
/// CUDA, or there is no driver, too old a driver, or no visible GPU. Nothing if it can.
std::optional<std::string> why_unavailable();

/// Joins the world: every rank calls it, and blocks until all have. CommError after the timeout;
/// c10::Error with why_unavailable() if that is the case, or when the local rank has no visible
/// GPU. The calling thread's current device becomes the rank's GPU, and its threads are bound to
/// the CPUs near it.
///
/// All operations are asynchronous to the host. On a failure (see Watchdog: a rank that died, an
/// operation that was not done in time, an error of NCCL) every rank gets one CommError that names
/// the operation, the group, its number and what the other ranks last reported; what waits for the
/// GPU returns with it, and after it every use of communication throws it. The destructor waits
/// until all ranks have come to theirs, for the timeout at most, unless this rank has failed or an
/// exception is under way; then the others are told.
std::unique_ptr<comm::Runtime> make_runtime(const NcclOptions& options);

}  // namespace ppfsdp::nccl
