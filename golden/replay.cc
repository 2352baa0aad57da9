// Repeats a recorded training run and says how far it is from the recording. See --help.
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "backends/gloo/gloo.h"
#include "golden/case.h"
#include "golden/compare.h"
#include "golden/train.h"
#include "sim/mesh/schedule.h"
#include "sim/mesh/world.h"
#include "src/cli/launch.h"
#include "src/cli/report.h"
#include "src/comm/host_memory.h"

namespace ppfsdp::golden {
namespace {

constexpr int kEqual = 0, kDiffers = 1, kBadInput = 2;
/// Steps whose time does not count: the first ones build what later ones reuse.
constexpr size_t kWarmUp = 3;
/// Tokens of all steps are drawn before the first.
constexpr int64_t kMostSteps = 1'000'000;

struct Arguments {
  std::filesystem::path json;
  std::string backend = "sim";
  std::string order = "gloo_ring";
  std::string schedule = "lazy";
  uint64_t seed = 0;
  int64_t time = 0;
  bool exact = false;
};

/// Paths are the user's: under `bazel run` relative to where the command was given.
std::filesystem::path from_user(const std::filesystem::path& path) {
  const char* directory = std::getenv("BUILD_WORKING_DIRECTORY");
  return directory == nullptr ? path : std::filesystem::path(directory) / path;
}

/// Runs the case on the chosen backend. Nothing on a rank that is not to report.
std::optional<Outputs> run(const Arguments& arguments, const Case& config, const Inputs& inputs,
                           bool values, comm::Runtime* gloo) {
  const comm::ReductionOrder order = comm::parse_reduction_order(arguments.order);
  if (arguments.backend == "single") return train_single(config, inputs, order, values);
  if (gloo != nullptr) {
    Outputs outputs = train_sharded(config, inputs, *gloo, values);
    if (gloo->rank() != 0) return std::nullopt;
    return outputs;
  }
  std::optional<Outputs> result;
  const sim::WorldOptions options{
      .seed = arguments.seed, .schedule = sim::parse_schedule(arguments.schedule), .order = order};
  sim::run_world(static_cast<int>(config.world), options, [&](comm::Runtime& runtime) {
    Outputs outputs = train_sharded(config, inputs, runtime, values);
    if (runtime.rank() == 0) result = std::move(outputs);
  });
  return result;
}

/// JSON has no infinity.
nlohmann::ordered_json number(double value) {
  if (std::isfinite(value)) return value;
  return "Infinity";
}

/// Says what is wrong, as the launcher looks for it.
int fail(int code, const std::string& what) {
  fmt::print(stderr, "ppfsdp: error: {}\n", what);
  return code;
}

/// The recording, or the case alone when it is only to be timed.
Recording read(const Arguments& arguments) {
  const std::filesystem::path json = from_user(arguments.json);
  if (arguments.time == 0 || std::filesystem::exists(tensors_beside(json))) {
    return read_recording(json);
  }
  Recording alone;
  alone.name = json.stem().string();
  alone.config = read_case(json);
  return alone;
}

/// The launcher's variables, which must be of the case's world.
gloo::GlooOptions gloo_options(const Case& config) {
  gloo::GlooOptions options = gloo::GlooOptions::from_environment();
  TORCH_CHECK(options.world_size == config.world, "the case needs ", config.world,
              " ranks; the launcher's WORLD_SIZE is ", options.world_size);
  return options;
}

int replay(const Arguments& arguments, const Recording& recording,
           const std::optional<gloo::GlooOptions>& options) {
  const Case& config = recording.config;
  std::unique_ptr<comm::Runtime> gloo;
  if (options) gloo = gloo::make_runtime(*options);
  nlohmann::ordered_json line = {
      {"case", recording.name}, {"backend", arguments.backend}, {"world", config.world}};
  std::optional<Difference> difference;
  if (!recording.outputs.steps.empty()) {
    const std::optional<Outputs> outputs =
        run(arguments, config, recording.inputs, /*values=*/true, gloo.get());
    if (outputs) {
      difference = compare(*outputs, recording.outputs);
      line["bitwise"] = difference->bitwise;
      line["max_loss_rel"] = number(difference->loss_rel);
      line["max_grad_norm_rel"] = number(difference->grad_norm_rel);
      line["max_grad_abs"] = number(difference->grad_abs);
      line["max_param_abs"] = number(difference->param_abs);
    }
  }
  if (arguments.time > 0) {
    const Inputs inputs = make_inputs(config, arguments.time);
    std::optional<Outputs> outputs = run(arguments, config, inputs, /*values=*/false, gloo.get());
    if (outputs) {
      std::vector<double>& ms = outputs->step_ms;
      ms.erase(ms.begin(), ms.begin() + kWarmUp);
      std::ranges::sort(ms);
      line["median_ms"] = ms[ms.size() / 2];
      line["min_ms"] = ms.front();
    }
  }
  if (gloo == nullptr || gloo->rank() == 0) fmt::print("{}\n", line.dump());
  if (!difference || difference->bitwise) return kEqual;
  const std::string what =
      fmt::format("{}: first difference: {}", recording.name, difference->first);
  if (arguments.exact || !within(*difference, tolerance(config, *difference))) {
    return fail(kDiffers, what);
  }
  fmt::print(stderr, "{} (within tolerance)\n", what);
  return kEqual;
}

int run_tool(int argc, char** argv) {
  Arguments arguments;
  CLI::App app(
      "Repeats a recorded training run (F.json beside F.safetensors) from the same initial values\n"
      "on the same tokens and prints one line of JSON: how far losses, gradient norms, gradients\n"
      "and final parameters are from the recording.\n"
      "Exit code 0: equal within the tolerance for another order of additions; 1: not; 2: bad\n"
      "input.",
      "replay");
  app.add_option("--case", arguments.json, "F.json")->required();
  app.add_option("--backend", arguments.backend,
                 "sim: every rank in this process; gloo: one process a rank, started from here; "
                 "single: a plain model, each rank's microbatch in turn")
      ->check(CLI::IsMember({"sim", "gloo", "single"}))
      ->capture_default_str();
  app.add_option("--order", arguments.order, "in which the ranks' values are added")
      ->check(CLI::IsMember({"gloo_ring", "rank_order", "nccl_ring", "tree"}))
      ->capture_default_str();
  app.add_option("--schedule", arguments.schedule, "of the simulated mesh")
      ->check(CLI::IsMember(sim::schedule_names()))
      ->capture_default_str();
  app.add_option("--seed", arguments.seed, "of the random schedule")->capture_default_str();
  app.add_option(
         "--time", arguments.time,
         fmt::format("also time this many steps (more than {}, which do not count), in ms a "
                     "step; F.json alone is enough",
                     kWarmUp))
      ->check(CLI::Range(int64_t{0}, kMostSteps));
  app.add_flag("--exact", arguments.exact, "exit code 1 unless every bit is equal");
  Recording recording;
  std::optional<gloo::GlooOptions> gloo;
  try {
    app.parse(argc, argv);
    TORCH_CHECK(arguments.time == 0 || arguments.time > static_cast<int64_t>(kWarmUp), "--time ",
                arguments.time, ": must be more than ", kWarmUp);
    TORCH_CHECK(arguments.backend != "gloo" || arguments.order == "gloo_ring", "--order ",
                arguments.order,
                ": Gloo folds as gloo_ring; other orders need --backend sim or single");
    recording = read(arguments);
    if (arguments.backend == "gloo" && std::getenv("RANK") == nullptr) {
      return cli::launch({.processes = static_cast<int>(recording.config.world),
                          .prefix_lines = false,
                          .command = {argv + 1, argv + argc}});
    }
    if (arguments.backend == "gloo") gloo = gloo_options(recording.config);
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const std::exception& error) {
    return fail(kBadInput, cli::one_line(error));
  }
  return replay(arguments, recording, gloo);
}

}  // namespace
}  // namespace ppfsdp::golden

int main(int argc, char** argv) {
  try {
    ppfsdp::comm::keep_freed_memory();
    // One intra-op thread: the split of a sum over threads would change its bits.
    at::set_num_threads(1);
    ppfsdp::cli::quieten_libtorch();
    return ppfsdp::golden::run_tool(argc, argv);
  } catch (const std::exception& error) {
    return ppfsdp::cli::report(error);
  }
}
