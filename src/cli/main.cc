#include <ATen/Parallel.h>
#include <c10/util/Logging.h>
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>

#include "src/cli/config_options.h"
#include "src/cli/launch.h"
#include "src/cli/report.h"
#include "src/cli/train_command.h"
#include "src/cli/verify_command.h"
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

/// What goes wrong is reported in one line. LibTorch's sockets would put warnings about the same
/// round it, so they are written only for who asks for them with TORCH_CPP_LOG_LEVEL.
void quieten_libtorch() {
  if (std::getenv("TORCH_CPP_LOG_LEVEL") != nullptr) {
    c10::initLogging();
  } else {
    FLAGS_caffe2_log_level = c10::GLOG_ERROR;
  }
}

void add_launch_options(CLI::App& command, LaunchOptions& options) {
  command.add_option("-n,--processes", options.processes, "Processes to start, one a rank")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  command.add_option("--port", options.port, "Port where rank 0 listens; 0: one that is free now")
      ->check(CLI::Range(0, 65535))
      ->capture_default_str();
  command
      .add_option("--grace", options.grace_s,
                  "Seconds that the others get to end after one has failed")
      ->check(CLI::Range(0.0, 1e6))
      ->capture_default_str();
  command.add_option("COMMAND", options.command, "-- train ... or -- verify ...")->required();
}

int run(int argc, char** argv) {
  CLI::App app(
      "Per-parameter fully sharded training on a simulated mesh, on Gloo or on one device.",
      "ppfsdp");
  app.require_subcommand(1);
  app.footer("ppfsdp SUBCOMMAND --help tells more.");

  ConfigOptions train_options;
  CLI::App* train = app.add_subcommand("train", "Train a Llama; without arguments the debug one");
  add_config_options(*train, train_options);

  ConfigOptions verify_options;
  CLI::App* verify = app.add_subcommand(
      "verify", "Show that sharded training equals one device's: bit for bit, or within tolerance");
  bool exact = false, tolerance = false;
  CLI::Option* exact_flag = verify->add_flag(
      "--exact", exact,
      "Equal bits against one process that runs the ranks in turn and folds as the mesh does "
      "(default)");
  verify
      ->add_flag("--tolerance", tolerance,
                 "Within a derived tolerance against one device over the whole batch")
      ->excludes(exact_flag);
  add_config_options(*verify, verify_options);

  LaunchOptions launch_options;
  CLI::App* launcher =
      app.add_subcommand("launch", "Start one process a rank: ppfsdp launch -n 4 -- train [...]");
  add_launch_options(*launcher, launch_options);

  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    throw train::ConfigError(error.what());
  }
  go_where_the_user_stands();
  if (train->parsed()) return train_command(train_options);
  if (verify->parsed()) {
    return verify_command(verify_options,
                          tolerance ? train::VerifyMode::kTolerance : train::VerifyMode::kExact);
  }
  return launch(launch_options);
}

}  // namespace
}  // namespace ppfsdp::cli

int main(int argc, char** argv) {
  try {
    // One thread: part of every claim to equal bits, and ranks are the parallelism.
    at::set_num_threads(1);
    ppfsdp::cli::quieten_libtorch();
    return ppfsdp::cli::run(argc, argv);
  } catch (const std::exception& error) {
    return ppfsdp::cli::report(error);
  }
}
