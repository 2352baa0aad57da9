#include "src/cli/runtimes.h"

#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <string>

#include "backends/gloo/gloo.h"
#include "sim/mesh/schedule.h"
#include "sim/mesh/world.h"
#include "src/cli/report.h"
#include "src/comm/single_runtime.h"
#include "src/train/config_error.h"

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

/// What the launcher's variables say; faults of theirs are the user's.
gloo::GlooOptions gloo_options() {
  try {
    return gloo::GlooOptions::from_environment();
  } catch (const std::exception& error) {
    throw ConfigError(
        fmt::format("communication.backend = \"gloo\": {}; start it with a launcher, as "
                    "in ppfsdp launch -n 2 -- train, or torchrun",
                    one_line(error)));
  }
}

}  // namespace

train::Config resolve_backend(const train::LoadedConfig& loaded) {
  train::Config config = loaded.config;
  train::CommunicationConfig& communication = config.communication;
  const bool has_rank = std::getenv("RANK") != nullptr;
  const bool launched = has_rank && std::getenv("WORLD_SIZE") != nullptr;
  if (has_rank && !launched) {
    throw ConfigError(
        "the environment has RANK without WORLD_SIZE: a launcher sets both, and without one "
        "neither may be set");
  }
  if (launched && !loaded.given.contains("communication.backend")) communication.backend = "gloo";
  const bool ranks_given = loaded.given.contains("parallelism.ranks");
  int64_t ranks = config.parallelism.ranks;
  if (communication.backend == "gloo") {
    ranks = gloo_options().world_size;
  } else if (launched) {
    throw ConfigError(
        fmt::format("communication.backend = \"{}\" runs in one process, but a launcher started "
                    "this one as rank "
                    "{} of {}; leave the backend out or set it to \"gloo\"",
                    communication.backend, std::getenv("RANK"), std::getenv("WORLD_SIZE")));
  } else if (communication.backend == "single") {
    ranks = 1;
  }
  if (ranks_given && config.parallelism.ranks != ranks) {
    throw ConfigError(
        fmt::format("parallelism.ranks = {} does not fit communication.backend = \"{}\", whose "
                    "world here is {}",
                    config.parallelism.ranks, communication.backend, ranks));
  }
  config.parallelism.ranks = ranks;
  return config;
}

bool leads(const train::Config& config) {
  return config.communication.backend != "gloo" || std::string(std::getenv("RANK")) == "0";
}

void run_ranks(const train::Config& config, const std::function<void(comm::Runtime&)>& fn) {
  const train::CommunicationConfig& communication = config.communication;
  if (communication.backend == "sim") {
    sim::run_world(static_cast<int>(config.parallelism.ranks), world_options(communication), fn);
  } else if (communication.backend == "gloo") {
    gloo::GlooOptions options = gloo_options();
    options.timeout = std::chrono::milliseconds(std::llround(communication.timeout_s * 1e3));
    const std::unique_ptr<comm::Runtime> runtime = gloo::make_runtime(options);
    fn(*runtime);
  } else {
    const std::unique_ptr<comm::Runtime> runtime = comm::make_single_runtime();
    fn(*runtime);
  }
}

}  // namespace ppfsdp::cli
