#include "src/cli/launch_flags.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <thread>

#include "src/train/config_error.h"

namespace ppfsdp::cli {
namespace {

using train::ConfigError;

constexpr int kMaxProcesses = 1024;
/// torchrun's default.
constexpr int kPort = 29500;

/// A flag, or the variable that stands in for it.
struct Source {
  const char* flag;
  const char* variable;
  const char* meaning;
  /// What it says; nothing if neither is there.
  std::optional<std::string> text;
  const char* from;  ///< the flag or the variable

  Source(const char* flag, const char* variable, const char* meaning,
         const std::optional<std::string>& given, const start::Environment& environment)
      : flag(flag), variable(variable), meaning(meaning), text(given), from(flag) {
    const auto found = environment.find(variable);
    if (!text && found != environment.end() && !found->second.empty()) {
      text = found->second;
      from = variable;
    }
  }

  [[noreturn]] void refuse(const std::string& right) const {
    throw ConfigError(
        fmt::format("launch: {} must be {} ({}), got '{}'", from, right, meaning, *text));
  }

  int integer(int low, int high, int otherwise) const {
    if (!text) return otherwise;
    const std::optional<int64_t> value = start::parse_integer(*text, low, high);
    if (!value) refuse(fmt::format("an integer in [{}, {}]", low, high));
    return static_cast<int>(*value);
  }

  /// With several nodes it can't be left out.
  void require() const {
    if (text) return;
    throw ConfigError(fmt::format("launch: with several nodes {} (or {}) is needed: {}", flag,
                                  variable, meaning));
  }
};

int count_processes(const Source& source, const std::function<int()>& gpus, int otherwise) {
  if (!source.text) return otherwise;
  const std::string& text = *source.text;
  if (text == "auto" || text == "gpu") {
    const int count = gpus();
    if (count > 0) return count;
    if (text == "gpu") source.refuse("an integer where no GPU is visible");
  }
  if (text == "auto" || text == "cpu") {
    return std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, kMaxProcesses);
  }
  const std::optional<int64_t> count = start::parse_integer(text, 1, kMaxProcesses);
  if (!count) {
    source.refuse(fmt::format("an integer in [1, {}], auto, gpu or cpu", kMaxProcesses));
  }
  return static_cast<int>(*count);
}

}  // namespace

void add_launch_flags(CLI::App& command, LaunchFlags& flags, LaunchOptions& options) {
  command
      .add_option("-n,--processes,--nproc-per-node", flags.processes,
                  "Processes to start on this node, one a rank: a number, gpu (one a GPU), cpu, "
                  "or auto (gpu where there is one, else cpu) [2, or PET_NPROC_PER_NODE]")
      ->type_name("N");
  command
      .add_option("--nnodes", flags.nodes,
                  "Nodes, on each of which launch is run with the same "
                  "processes [1, or PET_NNODES]")
      ->type_name("N");
  command.add_option("--node-rank", flags.node_rank, "This node's number, from 0 [PET_NODE_RANK]")
      ->type_name("N");
  command
      .add_option("--master-addr", flags.master_addr,
                  "Host name or address of node 0, where rank 0 listens [127.0.0.1; with several "
                  "nodes PET_MASTER_ADDR]")
      ->type_name("HOST");
  command
      .add_option("--port,--master-port", flags.port,
                  "Port where rank 0 listens [one that is free; with several nodes 29500, or "
                  "PET_MASTER_PORT]")
      ->type_name("PORT");
  command
      .add_option("--grace", options.grace_s,
                  "Seconds that the others get to end after one has failed")
      ->check(CLI::Range(0.0, 1e6))
      ->check([](const std::string& text) {
        // No range leaves it out.
        return std::isnan(std::strtod(text.c_str(), nullptr)) ? "nan is no number" : "";
      })
      ->capture_default_str();
  command.add_option("COMMAND", options.command,
                     "train ... or verify ..., with all that follows; -- may stand before it");
}

void resolve_launch(const LaunchFlags& flags, const start::Environment& environment,
                    LaunchOptions& options, const std::function<int()>& gpus) {
  const Source processes("--nproc-per-node", "PET_NPROC_PER_NODE",
                         "processes to start on this node", flags.processes, environment);
  options.processes = count_processes(processes, gpus, options.processes);
  const int most_nodes = start::kMaxWorldSize / options.processes;
  options.nodes = Source("--nnodes", "PET_NNODES", "the number of nodes", flags.nodes, environment)
                      .integer(1, most_nodes, options.nodes);
  // A node alone needs no address that others see, and an operator's may not have one yet.
  const bool several = options.nodes > 1;
  const start::Environment nothing;
  const start::Environment& of_nodes = several ? environment : nothing;
  const Source node_rank("--node-rank", "PET_NODE_RANK", "this node's number, from 0",
                         flags.node_rank, of_nodes);
  const Source address("--master-addr", "PET_MASTER_ADDR", "host name or address of node 0",
                       flags.master_addr, of_nodes);
  const Source port("--master-port", "PET_MASTER_PORT", "port where rank 0 listens", flags.port,
                    of_nodes);
  if (several) {
    node_rank.require();
    address.require();
  }
  options.node_rank = node_rank.integer(0, options.nodes - 1, 0);
  if (address.text && address.text->empty()) address.refuse("a host name or address");
  if (address.text) options.master_addr = *address.text;
  // All nodes must know the port; one alone may find a free one.
  options.port = port.integer(several ? 1 : 0, 65535, several ? kPort : 0);
}

}  // namespace ppfsdp::cli
