#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "src/train/config.h"

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

/// The config, its backend resolved and everything checked that can be before ranks run. Throws
/// ConfigError, and another error when this machine has too little memory (unless nothing is to be
/// trained).
train::Config read_config(const ConfigOptions& options);

}  // namespace ppfsdp::cli
