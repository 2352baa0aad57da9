#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>

#include "backends/start/launcher.h"
#include "src/cli/command_line.h"
#include "src/cli/config_options.h"
#include "src/cli/launch.h"
#include "src/cli/report.h"
#include "src/cli/train_command.h"
#include "src/cli/verify_command.h"
#include "src/comm/host_memory.h"
#include "src/train/config_error.h"

namespace ppfsdp::cli {
namespace {

/// Paths that the user gives are relative to where the user stands, which is not where `bazel run`
/// starts this process.
void go_where_the_user_stands() {
  const char* folder = std::getenv("BUILD_WORKING_DIRECTORY");
  if (folder != nullptr && chdir(folder) != 0) {
    throw train::ConfigError(
        fmt::format("BUILD_WORKING_DIRECTORY={}: {}", folder, std::strerror(errno)));
  }
}

/// Starts the ranks. What is wrong with their command is said once, here.
int launch_command(const LaunchOptions& options) {
  const CommandLine command = parse_command_line(options.command);
  if (command.action == CommandLine::Action::kHelp) {
    fmt::print("{}", command.help);
    return kSuccess;
  }
  if (command.action == CommandLine::Action::kLaunch) {
    throw train::ConfigError("launch starts train or verify, not another launch");
  }
  // As this node's first rank sees it.
  const start::Launched first = place_of(options, 0);
  const RunPlan plan = command.action == CommandLine::Action::kTrain
                           ? read_config(command.config, first)
                           : read_verify_config(command.config, command.mode, first);
  if (command.config.print_config) {
    fmt::print("{}", train::to_toml(plan.config));
    return kSuccess;
  }
  return launch(options);
}

int run(const CommandLine& line) {
  switch (line.action) {
    case CommandLine::Action::kHelp:
      fmt::print("{}", line.help);
      return kSuccess;
    case CommandLine::Action::kTrain:
      return train_command(line.config);
    case CommandLine::Action::kVerify:
      return verify_command(line.config, line.mode);
    case CommandLine::Action::kLaunch:
      return launch_command(line.launch);
  }
  return kFailure;
}

}  // namespace
}  // namespace ppfsdp::cli

int main(int argc, char** argv) {
  try {
    // One thread: part of every claim to equal bits, and ranks are the parallelism.
    ppfsdp::comm::keep_freed_memory();
    at::set_num_threads(1);
    ppfsdp::cli::quieten_libtorch();
    const auto line = ppfsdp::cli::parse_command_line({argv + 1, argv + argc},
                                                      ppfsdp::start::process_environment());
    ppfsdp::cli::go_where_the_user_stands();
    return ppfsdp::cli::run(line);
  } catch (const std::exception& error) {
    return ppfsdp::cli::report(error);
  }
}
