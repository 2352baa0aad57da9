#pragma once

#include <cstdint>
#include <vector>

#include "golden/case.h"
#include "src/comm/reduction.h"
#include "src/comm/runtime.h"

namespace ppfsdp::golden {

/// Runs the case as rank runtime.rank() of runtime.world_size() = config.world ranks: fully_shard
/// on each block, then on the model. Steps are those of inputs.tokens. Every rank calls it; each
/// returns all of the outputs. With `values` false only step_ms is filled, and only the steps
/// themselves communicate.
Outputs train_sharded(const Case& config, const Inputs& inputs, comm::Runtime& runtime,
                      bool values = true);

/// The same on a plain model in one process, with the gradients folded in `order`
/// (ReferenceTrainer).
Outputs train_single(const Case& config, const Inputs& inputs, comm::ReductionOrder order,
                     bool values = true);

}  // namespace ppfsdp::golden
