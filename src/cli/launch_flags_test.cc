#include "src/cli/launch_flags.h"

#include <gtest/gtest.h>

#include "src/train/config_error.h"
#include "src/train/test_util.h"

namespace ppfsdp::cli {
namespace {

const start::Environment kPod = {{"PET_NNODES", "2"},
                                 {"PET_NPROC_PER_NODE", "4"},
                                 {"PET_NODE_RANK", "1"},
                                 {"PET_MASTER_ADDR", "job-node-0-0.job"},
                                 {"PET_MASTER_PORT", "29400"}};

LaunchOptions resolve(const LaunchFlags& flags, start::Environment environment = {},
                      const start::Environment& changes = {}, int gpus = 0) {
  for (const auto& [name, value] : changes) environment[name] = value;
  LaunchOptions options;
  resolve_launch(flags, environment, options, [&] { return gpus; });
  return options;
}

std::string error_of(const LaunchFlags& flags, const start::Environment& environment = {},
                     const start::Environment& changes = {}) {
  return train::message_of<train::ConfigError>([&] { resolve(flags, environment, changes); });
}

TEST(LaunchFlags, one_node_needs_none) {
  const LaunchOptions options = resolve({});
  EXPECT_EQ(options.processes, 2);
  EXPECT_EQ(options.nodes, 1);
  EXPECT_EQ(options.node_rank, 0);
  EXPECT_EQ(options.master_addr, "127.0.0.1");
  EXPECT_EQ(options.port, 0) << "one that is free";
}

TEST(LaunchFlags, several_nodes) {
  const LaunchOptions options =
      resolve({.processes = "4", .nodes = "3", .node_rank = "2", .master_addr = "node-0"});
  EXPECT_EQ(options.processes, 4);
  EXPECT_EQ(options.nodes, 3);
  EXPECT_EQ(options.node_rank, 2);
  EXPECT_EQ(options.master_addr, "node-0");
  EXPECT_EQ(options.port, 29500) << "one that all nodes know";
}

// Kubernetes' training operator sets them, and means the same launch by them as torchrun does.
TEST(LaunchFlags, variables_stand_in_for_flags) {
  const LaunchOptions pod = resolve({}, kPod);
  EXPECT_EQ(pod.processes, 4);
  EXPECT_EQ(pod.nodes, 2);
  EXPECT_EQ(pod.node_rank, 1);
  EXPECT_EQ(pod.master_addr, "job-node-0-0.job");
  EXPECT_EQ(pod.port, 29400);
  const LaunchOptions flags = resolve(
      {.processes = "1", .nodes = "3", .node_rank = "0", .master_addr = "x", .port = "7"}, kPod);
  EXPECT_EQ(flags.processes, 1);
  EXPECT_EQ(flags.nodes, 3);
  EXPECT_EQ(flags.node_rank, 0);
  EXPECT_EQ(flags.master_addr, "x");
  EXPECT_EQ(flags.port, 7);
}

// The name of a pod may have no address before the pod is ready, and a port may be another job's.
TEST(LaunchFlags, one_node_meets_at_home) {
  const LaunchOptions pod = resolve({}, kPod, {{"PET_NNODES", "1"}, {"PET_NODE_RANK", "0"}});
  EXPECT_EQ(pod.master_addr, "127.0.0.1");
  EXPECT_EQ(pod.port, 0);
  EXPECT_EQ(resolve({.port = "1234"}).port, 1234);
}

TEST(LaunchFlags, processes_by_what_the_machine_has) {
  EXPECT_EQ(resolve({.processes = "gpu"}, {}, {}, 8).processes, 8);
  EXPECT_EQ(resolve({.processes = "auto"}, {}, {}, 8).processes, 8);
  EXPECT_EQ(resolve({.processes = "auto"}).processes, resolve({.processes = "cpu"}).processes);
  EXPECT_GE(resolve({.processes = "cpu"}, {}, {}, 8).processes, 1);
  EXPECT_EQ(
      error_of({.processes = "gpu"}),
      "launch: --nproc-per-node must be an integer where no GPU is visible (processes to start "
      "on this node), got 'gpu'");
}

TEST(LaunchFlags, faults_name_the_flag_or_the_variable) {
  EXPECT_EQ(error_of({.processes = "0"}),
            "launch: --nproc-per-node must be an integer in [1, 1024], auto, gpu or cpu (processes "
            "to start on this node), got '0'");
  EXPECT_EQ(error_of({}, kPod, {{"PET_NNODES", "1:3"}}),
            "launch: PET_NNODES must be an integer in [1, 16384] (the number of nodes), got '1:3'");
  EXPECT_EQ(
      error_of({.nodes = "2", .node_rank = "2", .master_addr = "a"}),
      "launch: --node-rank must be an integer in [0, 1] (this node's number, from 0), got '2'");
  EXPECT_EQ(
      error_of({.nodes = "2", .node_rank = "1", .master_addr = "a", .port = "0"}),
      "launch: --master-port must be an integer in [1, 65535] (port where rank 0 listens), got "
      "'0'");
  EXPECT_EQ(error_of({.nodes = "2", .master_addr = "a"}),
            "launch: with several nodes --node-rank (or PET_NODE_RANK) is needed: this node's "
            "number, from 0");
  EXPECT_EQ(error_of({.nodes = "2", .node_rank = "1"}),
            "launch: with several nodes --master-addr (or PET_MASTER_ADDR) is needed: host name or "
            "address of node 0");
  EXPECT_EQ(error_of({.master_addr = ""}),
            "launch: --master-addr must be a host name or address (host name or address of node "
            "0), got ''");
  EXPECT_EQ(
      error_of({.node_rank = "1"}),
      "launch: --node-rank must be an integer in [0, 0] (this node's number, from 0), got '1'");
}

}  // namespace
}  // namespace ppfsdp::cli
