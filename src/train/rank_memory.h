#pragma once

#include <cstdint>

#include "src/comm/runtime.h"
#include "src/train/config.h"

namespace ppfsdp::train {

/// What one rank holds of a Config's model between steps, and has to gather within them.
struct RankMemory {
  int64_t parameters = 0;           ///< of the whole model, in elements
  int64_t groups = 0;               ///< that are gathered on their own; 0 without sharding
  int64_t parameter_bytes = 0;      ///< this rank's shards with their padding
  int64_t gradient_bytes = 0;       ///< likewise
  double optimizer_bytes = 0;       ///< of one value or more a parameter of the shard
  int64_t largest_group_bytes = 0;  ///< gathered, in the compute dtype

  /// Of the largest model that a Config can name more than an int64_t holds.
  double held_bytes() const {
    return static_cast<double>(parameter_bytes) + static_cast<double>(gradient_bytes) +
           optimizer_bytes;
  }
};

/// Counts it on the model itself, built and sharded on meta: takes no memory for any size. Every
/// rank calls it.
RankMemory count_rank_memory(const Config& config, comm::Runtime& runtime);

}  // namespace ppfsdp::train
