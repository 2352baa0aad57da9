#pragma once

#include <string>
#include <vector>

namespace ppfsdp::cli {

struct LaunchOptions {
  int processes = 2;
  /// Where rank 0 listens; 0: a port that is free now.
  int port = 0;
  /// How long processes get to end by themselves after SIGTERM, before SIGKILL.
  double grace_s = 10;
  /// Whether each line of a process's output is led by "[rank] ".
  bool prefix_lines = true;
  /// The arguments of this binary that every process gets.
  std::vector<std::string> command;
};

/// Runs this binary `processes` times with torchrun's variables RANK, WORLD_SIZE, LOCAL_RANK,
/// LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, passes their output on in whole lines,
/// and waits for all. When one fails the others are ended, and its error alone is reported
/// (rather than those of ranks that failed since it was gone). SIGINT and SIGTERM are passed on; a
/// second one kills the processes. They never outlive this process.
///
/// Returns 0; kUsage if that is how the failing process ended, else kFailure; 128 + n after signal
/// n to this process. Throws std::runtime_error when a process can't be started.
int launch(const LaunchOptions& options);

}  // namespace ppfsdp::cli
