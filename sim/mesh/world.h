#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "src/comm/reduction.h"
#include "src/comm/runtime.h"

namespace ppfsdp::sim {

enum class Schedule {
  kRoundRobin,  ///< ranks and streams take turns in order
  kRandom,      ///< the seed picks who runs next at every hand-over
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

/// Runs `fn` once for each of `n` ranks (1 to 1024), each on its own thread of which exactly one runs
/// at a time. Same arguments, same run, bit for bit. Returns when all ranks have; when one throws, all
/// are ended and that rank's exception is thrown here, its message led by "rank R: ". A run in which no
/// rank can go on is an error that says what each rank waits for.
void run_world(int n, const WorldOptions& options,
               const std::function<void(comm::Runtime& runtime)>& fn);

}  // namespace ppfsdp::sim
