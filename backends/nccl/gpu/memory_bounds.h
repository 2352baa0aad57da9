#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "backends/nccl/gpu/training.h"

namespace ppfsdp::nccl::testing {

/// What a device's allocator says of the bytes that tensors hold.
struct MemoryMeter {
  std::function<int64_t()> now;
  std::function<int64_t()> peak;  ///< the most since the last reset
  std::function<void()> reset;
};

/// The most memory that a part of a step took, and may take, of what belongs to sharding: without
/// optimizer states (but in the optimizer's own step), the batch and workspaces.
struct Phase {
  std::string name;
  int64_t peak = 0;   ///< bytes
  int64_t bound = 0;  ///< bytes
};

/// Trains some steps and measures one: forward, backward, and clipping with the optimizer's step,
/// which must be the fused one (the others make a temporary of the shards' size). The bounds are
/// those of FSDP2's own memory tests. With B the bytes of the largest block's parameters, N those
/// of the root's own and S a rank's part of all of them,
///
///   forward    3 B + N + S    a gathered buffer and what it is copied to, and the next buffer
///   backward   4 B + N + 2 S  a gathered buffer and what it is copied to, gradients and the
///                             reduce-scatter's input; the gradients of the shards
///   optimizer  4 S            shards, gradients and two states
///
/// (each with forward's activations, and `slack` bytes a block for what allocators round up).
std::vector<Phase> measure_phases(const TrainingOptions& options, comm::Runtime& runtime,
                                  const MemoryMeter& meter, int64_t slack);

}  // namespace ppfsdp::nccl::testing
