#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "src/cli/runtimes.h"

namespace ppfsdp::cli {

/// What the subcommands that take a config have in common.
struct ConfigOptions {
  std::string file;
  std::vector<std::string> overrides;
  bool print_config = false;
  bool dry_run = false;  ///< only train takes it
};

/// Adds the arguments CONFIG, --set and --print-config to `command`, and every key to its --help.
void add_config_options(CLI::App& command, ConfigOptions& options);

/// The config, its backend resolved for a process that was launched so, and everything checked that
/// can be before ranks run. Throws ConfigError, and another error when this machine has too little
/// memory (unless nothing is to be trained, or not in this machine's memory but a GPU's).
RunPlan read_config(const ConfigOptions& options, const std::optional<start::Launched>& launched);

}  // namespace ppfsdp::cli
