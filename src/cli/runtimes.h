#pragma once

#include <functional>
#include <optional>
#include <string>

#include "backends/start/launcher.h"
#include "backends/start/meeting.h"
#include "src/comm/runtime.h"
#include "src/train/config.h"

namespace ppfsdp::cli {

/// A config, and who is to run it.
struct RunPlan {
  train::Config config;
  /// This process's place among those that a launcher started, each of which holds one rank.
  /// Nothing when this process holds all ranks.
  std::optional<start::Launched> launched;

  bool one_process_a_rank() const { return launched.has_value(); }
  /// Whether this process holds rank 0.
  bool leads() const { return !launched || launched->rank == 0; }
};

/// What a launcher told this process. Throws ConfigError for variables that are at fault.
std::optional<start::Launched> launched_process();

/// Why NCCL can't run here, if it can't.
using WhyNoNccl = std::function<std::optional<std::string>()>;
std::optional<std::string> why_no_nccl();

/// Decides what the config leaves open and the launcher tells: under one the backend is nccl where
/// that can run, else gloo, unless the config names one, and parallelism.ranks is the world's size,
/// 1 on one device. Throws ConfigError for what does not fit together: a backend that runs in one
/// process under a launcher of more, one that takes a process a rank without a launcher, nccl where
/// it can't run, another number of ranks than the launcher started.
RunPlan resolve_backend(const train::LoadedConfig& loaded,
                        const std::optional<start::Launched>& launched,
                        const WhyNoNccl& no_nccl = why_no_nccl);

/// What the ranks of a launcher must have in common: the build of this program and every key of the
/// config but [metrics], which rank 0 alone heeds.
std::vector<start::Fact> facts_of(const train::Config& config);

/// Runs `fn` once for each rank that this process holds, by communication.backend of what
/// resolve_backend gave: all of the simulated mesh, this process's one of NCCL or Gloo, or the one
/// of a world of one. Throws what `fn` throws (see sim::run_world), and CommError when the other
/// ranks don't come or don't agree in facts_of().
void run_ranks(const RunPlan& plan, const std::function<void(comm::Runtime&)>& fn);

}  // namespace ppfsdp::cli
