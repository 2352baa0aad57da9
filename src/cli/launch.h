#pragma once

#include <string>
#include <vector>

#include "backends/start/launcher.h"

namespace ppfsdp::cli {

struct LaunchOptions {
  /// On this node, one a rank; each node starts as many.
  int processes = 2;
  int nodes = 1;
  int node_rank = 0;
  /// Where rank 0, on node 0, listens. Port 0: one that is free, on one node alone.
  std::string master_addr = "127.0.0.1";
  int port = 0;
  /// How long processes get to end by themselves after SIGTERM, before SIGKILL.
  double grace_s = 10;
  /// Whether each line of a process's output is led by "[rank] ".
  bool prefix_lines = true;
  /// The arguments of this binary that every process gets.
  std::vector<std::string> command;
};

/// What the process of that number on this node is to be.
start::Launched place_of(const LaunchOptions& options, int local_rank);

/// Runs this binary `processes` times with torchrun's variables RANK (node_rank x processes + the
/// process's number on this node), WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
/// MASTER_PORT, passes their output on in whole lines, and waits for all. When one fails the others
/// are ended, and its error alone is reported (rather than those of ranks that failed since it was
/// gone). SIGINT and SIGTERM are passed on; a second one kills the processes. They never outlive
/// this process.
///
/// Returns 0; kUsage if that is how the failing process ended, else kFailure; 128 + n after signal
/// n to this process. Throws std::runtime_error when a process can't be started.
int launch(const LaunchOptions& options);

}  // namespace ppfsdp::cli
