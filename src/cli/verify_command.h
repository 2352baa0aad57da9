#pragma once

#include "src/cli/config_options.h"
#include "src/train/verify.h"

namespace ppfsdp::cli {

/// read_config, for what can be verified as `mode` says. Throws ConfigError.
RunPlan read_verify_config(const ConfigOptions& options, train::VerifyMode mode,
                           const std::optional<start::Launched>& launched);

/// `ppfsdp verify`: trains the config sharded and on one device beside it, prints a line a step,
/// and returns 0 when they agree as `mode` asks, else 1, with the first difference on standard
/// error. Throws.
int verify_command(const ConfigOptions& options, train::VerifyMode mode);

}  // namespace ppfsdp::cli
