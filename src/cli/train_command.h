#pragma once

#include "src/cli/config_options.h"

namespace ppfsdp::cli {

/// `ppfsdp train`: trains the config, with a line of metrics a step on standard output. Returns the
/// exit code: 0, or 128 + n after signal n, on which all ranks end after the same step. Throws.
int train_command(const ConfigOptions& options);

}  // namespace ppfsdp::cli
