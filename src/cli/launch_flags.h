#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <optional>
#include <string>

#include "backends/start/launcher.h"
#include "src/cli/gpus.h"
#include "src/cli/launch.h"

namespace ppfsdp::cli {

/// What `ppfsdp launch` was told, as text: where it was not, the environment may say it.
struct LaunchFlags {
  std::optional<std::string> processes, nodes, node_rank, master_addr, port;
};

/// Adds the options of `launch`, torchrun's names among them, to `command`. LaunchOptions takes
/// those that are as they stand.
void add_launch_flags(CLI::App& command, LaunchFlags& flags, LaunchOptions& options);

/// Fills in `options` from the flags, else from the variables that torchrun reads too and that
/// Kubernetes' training operator sets: PET_NPROC_PER_NODE, PET_NNODES, PET_NODE_RANK and, with
/// several nodes, PET_MASTER_ADDR and PET_MASTER_PORT. Throws ConfigError, one line that names the
/// flag or variable, what was got and what would be right.
void resolve_launch(const LaunchFlags& flags, const start::Environment& environment,
                    LaunchOptions& options, const std::function<int()>& gpus = count_gpus);

}  // namespace ppfsdp::cli
