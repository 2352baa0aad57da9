#pragma once

#include <string>
#include <vector>

#include "src/cli/config_options.h"
#include "src/cli/launch.h"
#include "src/train/verify.h"

namespace ppfsdp::cli {

/// What the user asks for.
struct CommandLine {
  enum class Action { kHelp, kTrain, kVerify, kLaunch };
  Action action = Action::kHelp;
  std::string help;                                    ///< kHelp: the text to print
  ConfigOptions config;                                ///< kTrain, kVerify
  train::VerifyMode mode = train::VerifyMode::kExact;  ///< kVerify
  LaunchOptions launch;                                ///< kLaunch; its command is not parsed yet
};

/// Parses the arguments that follow the program's name; `environment`: for launch, see
/// resolve_launch. Throws ConfigError, one line that names what was meant where that can be told.
CommandLine parse_command_line(std::vector<std::string> arguments,
                               const start::Environment& environment = {});

}  // namespace ppfsdp::cli
