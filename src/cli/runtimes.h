#pragma once

#include <functional>

#include "src/comm/runtime.h"
#include "src/train/config.h"

namespace ppfsdp::cli {

/// Decides what the config leaves open and the environment tells: under a launcher (torchrun's RANK
/// and WORLD_SIZE are set) the backend is gloo unless the config names one, and parallelism.ranks
/// is the world's size, 1 on one device. Throws ConfigError for what does not fit together: a
/// backend that runs in one process under a launcher, gloo without one, another number of ranks
/// than the launcher started.
train::Config resolve_backend(const train::LoadedConfig& loaded);

/// Whether this process holds rank 0, of a config that resolve_backend gave.
bool leads(const train::Config& config);

/// Runs `fn` once for each rank that this process holds, by communication.backend of a config that
/// resolve_backend gave: all of the simulated mesh, this process's one of Gloo, or the one of a
/// world of one. Throws what `fn` throws (see sim::run_world), and CommError when the other ranks
/// don't come.
void run_ranks(const train::Config& config, const std::function<void(comm::Runtime&)>& fn);

}  // namespace ppfsdp::cli
