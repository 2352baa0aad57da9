#include "src/cli/runtimes.h"

#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <memory>
#include <string>

#include "backends/gloo/gloo.h"
#include "backends/nccl/nccl.h"
#include "backends/start/build_id.h"
#include "sim/mesh/schedule.h"
#include "sim/mesh/world.h"
#include "src/cli/gpus.h"
#include "src/cli/report.h"
#include "src/comm/single_runtime.h"
#include "src/train/config_error.h"
#include "src/train/config_keys.h"

namespace ppfsdp::cli {
namespace {

using train::ConfigError;

sim::WorldOptions world_options(const train::CommunicationConfig& communication) {
  sim::WorldOptions options;
  options.seed = static_cast<uint64_t>(communication.sim_seed);
  options.schedule = sim::parse_schedule(communication.sim_schedule);
  options.order = comm::parse_reduction_order(communication.sim_order);
  options.poison = communication.sim_poison;
  return options;
}

bool takes_a_process_a_rank(const std::string& backend) {
  return backend == "gloo" || backend == "nccl";
}

/// Fills in what every backend of many processes takes.
void set_meeting(start::MeetingOptions& options, const RunPlan& plan) {
  options.take(*plan.launched);
  options.timeout =
      std::chrono::milliseconds(std::llround(plan.config.communication.timeout_s * 1e3));
  options.facts = facts_of(plan.config);
}

std::unique_ptr<comm::Runtime> make_runtime(const RunPlan& plan) {
  const std::string& backend = plan.config.communication.backend;
  if (backend == "nccl") {
    nccl::NcclOptions options;
    set_meeting(options, plan);
    options.local_rank = device_of(*plan.launched, count_gpus());
    // One line a node tells enough.
    if (plan.launched->local_rank == 0) {
      options.log = [rank = options.rank](const std::string& line) {
        fmt::print(stderr, "ppfsdp: rank {}: {}\n", rank, line);
      };
    }
    return nccl::make_runtime(options);
  }
  if (backend == "gloo") {
    gloo::GlooOptions options;
    set_meeting(options, plan);
    return gloo::make_runtime(options);
  }
  return comm::make_single_runtime();
}

}  // namespace

std::optional<start::Launched> launched_process() {
  try {
    return start::read_launcher(start::process_environment());
  } catch (const std::exception& error) {
    throw ConfigError(one_line(error));
  }
}

std::optional<std::string> why_no_nccl() { return nccl::why_unavailable(); }

RunPlan resolve_backend(const train::LoadedConfig& loaded,
                        const std::optional<start::Launched>& launched, const WhyNoNccl& no_nccl) {
  RunPlan plan{loaded.config, launched};
  std::string& backend = plan.config.communication.backend;
  if (launched && !loaded.given.contains("communication.backend")) {
    backend = no_nccl() ? "gloo" : "nccl";
  } else if (backend == "nccl") {
    if (const std::optional<std::string> reason = no_nccl()) {
      throw ConfigError(fmt::format("communication.backend = \"nccl\": {}", *reason));
    }
  }
  int64_t ranks = plan.config.parallelism.ranks;
  if (takes_a_process_a_rank(backend)) {
    if (!launched) {
      throw ConfigError(fmt::format(
          "communication.backend = \"{}\" takes a process for each rank, and no launcher started "
          "this one: WORLD_SIZE is not set; start it as in ppfsdp launch -n 2 -- train, or with "
          "torchrun or srun",
          backend));
    }
    ranks = launched->world_size;
  } else {
    if (launched && launched->world_size > 1) {
      throw ConfigError(fmt::format(
          "communication.backend = \"{}\" runs in one process, but a launcher ({}) started this "
          "one as rank {} of {}; leave the backend out or set it to \"gloo\"",
          backend, launched->launcher, launched->rank, launched->world_size));
    }
    plan.launched.reset();
    if (backend == "single") ranks = 1;
  }
  if (loaded.given.contains("parallelism.ranks") && loaded.config.parallelism.ranks != ranks) {
    throw ConfigError(
        fmt::format("parallelism.ranks = {} does not fit communication.backend = \"{}\", whose "
                    "world here is {}",
                    loaded.config.parallelism.ranks, backend, ranks));
  }
  plan.config.parallelism.ranks = ranks;
  return plan;
}

std::vector<start::Fact> facts_of(const train::Config& config) {
  std::vector<start::Fact> facts = {{"the build of this program", start::build_id()}};
  train::Config copy = config;
  for (const train::Key& key : train::config_keys()) {
    if (key.section() == "metrics") continue;
    facts.push_back({std::string(key.name), train::value_as_toml(key.field(copy))});
  }
  return facts;
}

void run_ranks(const RunPlan& plan, const std::function<void(comm::Runtime&)>& fn) {
  const train::Config& config = plan.config;
  if (config.communication.backend == "sim") {
    sim::run_world(static_cast<int>(config.parallelism.ranks), world_options(config.communication),
                   fn);
    return;
  }
  const std::unique_ptr<comm::Runtime> runtime = make_runtime(plan);
  fn(*runtime);
}

}  // namespace ppfsdp::cli
