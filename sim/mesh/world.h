#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "src/comm/reduction.h"
#include "src/comm/runtime.h"

namespace ppfsdp::sim {

enum class Schedule {
  /// Ranks and streams take turns in order; a rank's turn ends when it communicates or waits.
  kRoundRobin,
  /// The seed picks who runs next at every hand-over.
  kRandom,
  /// Ranks run until they must wait, and streams only when no rank can run: as late as possible, so
  /// that most missing waits show at once. The cheapest schedule.
  kLazy,
};

struct WorldOptions {
  uint64_t seed = 0;
  Schedule schedule = Schedule::kRoundRobin;
  comm::ReductionOrder order = comm::ReductionOrder::kGlooRing;
  /// Fill freed, fresh and in-flight buffers with NaN.
  bool poison = true;
  /// Bytes of stack a rank's thread gets.
  size_t stack_bytes = size_t{8} << 20;
};

/// Runs `fn` once for each of `n` ranks (1 to 1024), each on its own thread of which exactly one
/// runs at a time. They hand over only inside calls of the runtime, its streams, events and
/// communicators, so ranks may share variables without locks. Same arguments, same run, bit for
/// bit. The number of intra-op threads is set to one.
///
/// Closures queued on side streams run later, on whichever thread runs then, with the thread-local
/// state of LibTorch (grad mode and the like) of the call that queued them.
///
/// Returns when all ranks have and all streams are empty. When a rank throws, all are ended and its
/// exception is thrown here, the message led by "rank R: ", as comm::CommError, c10::Error or
/// std::runtime_error (nested: the original). Ranks that do not match in a collective, and a run in
/// which no rank can go on, are a comm::CommError that says what each rank did or waits for.
void run_world(int n, const WorldOptions& options,
               const std::function<void(comm::Runtime& runtime)>& fn);

}  // namespace ppfsdp::sim
