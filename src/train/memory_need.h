#pragma once

#include <cstdint>
#include <string>

#include "src/comm/runtime.h"
#include "src/train/config.h"

namespace ppfsdp::train {

/// float32 values of optimizer state for each parameter.
int state_values(const OptimizerConfig& optimizer);

/// Bytes that training by `config` holds at least, at the end of its first step, in all of its
/// ranks together: parameters, gradients and optimizer state in float32, each sharded once over the
/// ranks. What comes and goes within a step (gathered parameters, activations, buffers) is on top.
double least_bytes(const Config& config);

/// What to tell a user whose machine can not hold its share of that; empty if it may. `machine`:
/// bytes of memory that it has; `processes`: how many of a launcher's run on it. (All ranks of the
/// simulated mesh, and one device, are one process.)
std::string refuse_memory(const Config& config, double machine, int64_t processes);

/// The same of a rank with a device of its own and its share of the parameters, whatever the
/// backend's name; empty where ranks compute in the machine's memory.
std::string refuse_device_memory(const Config& config, const comm::Runtime& runtime);

}  // namespace ppfsdp::train
