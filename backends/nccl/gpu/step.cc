// Times a training step of a Llama on the NCCL backend and prints one line of JSON, as
// python_step.py does for Python's FSDP2. See --help.
#include <ATen/cuda/CUDAContextLight.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <nccl.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "backends/nccl/gpu/training.h"
#include "backends/nccl/nccl.h"
#include "src/cli/launch.h"
#include "src/cli/report.h"

namespace ppfsdp::nccl::testing {
namespace {

/// Of any number that may be given.
constexpr int64_t kMost = int64_t{1} << 30;

struct Arguments {
  TrainingOptions training = {.model = {.vocab_size = 32000,
                                        .dim = 2048,
                                        .n_layers = 8,
                                        .n_heads = 16,
                                        .n_kv_heads = 16,
                                        .hidden_dim = 5632,
                                        .max_seq_len = 2048},
                              .batch = 4};
  int steps = 20;
  int warmup = 5;
  int gpus = 1;
  std::string param_dtype = "bfloat16";
  std::string reduce_dtype = "float32";
  std::string optimizer = "fused";
};

at::ScalarType dtype_of(const std::string& name) {
  return name == "bfloat16" ? at::kBFloat16 : at::kFloat;
}

/// Milliseconds of each timed step, by events on the stream that computes.
std::vector<double> time_steps(const Arguments& arguments, Training& training,
                               comm::Runtime& runtime) {
  const c10::impl::VirtualGuardImpl guard(c10::kCUDA);
  const c10::Stream stream = guard.getStream(runtime.device());
  for (int step = 0; step < arguments.warmup; ++step) training.step();
  runtime.compute_stream().synchronize();
  std::vector<c10::Event> marks;
  for (int mark = 0; mark <= arguments.steps; ++mark) {
    marks.emplace_back(c10::kCUDA, c10::EventFlag::BACKEND_DEFAULT);
  }
  marks[0].record(stream);
  for (int step = 0; step < arguments.steps; ++step) {
    training.step();
    marks[step + 1].record(stream);
  }
  runtime.compute_stream().synchronize();
  std::vector<double> result;
  for (int step = 0; step < arguments.steps; ++step) {
    result.push_back(marks[step].elapsedTime(marks[step + 1]));
  }
  return result;
}

std::string nccl_version() {
  int version = 0;
  ncclGetVersion(&version);
  return fmt::format("{}.{}.{}", version / 10000, version % 10000 / 100, version % 100);
}

int run(const Arguments& arguments) {
  NcclOptions options;
  if (std::getenv("RANK") != nullptr) options = NcclOptions::from_environment();
  const std::unique_ptr<comm::Runtime> runtime = make_runtime(options);
  Training training(arguments.training, *runtime);
  std::vector<double> ms = time_steps(arguments, training, *runtime);
  std::ranges::sort(ms);
  if (runtime->rank() != 0) return 0;
  // As Python's statistics.median.
  const double median = (ms[(ms.size() - 1) / 2] + ms[ms.size() / 2]) / 2;
  const c10::Device device = runtime->device();
  const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
  const nn::LlamaConfig& model = arguments.training.model;
  const int64_t tokens = runtime->world_size() * arguments.training.batch * model.max_seq_len;
  const nlohmann::ordered_json line = {
      {"program", "ppfsdp, NCCL " + nccl_version()},
      {"device", at::cuda::getDeviceProperties(device.index())->name},
      {"world", runtime->world_size()},
      {"parameters", nn::parameter_count(model)},
      {"median_ms", median},
      {"min_ms", ms.front()},
      {"tokens_per_s", 1e3 * static_cast<double>(tokens) / median},
      {"peak_bytes",
       stats.allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)]
           .peak}};
  fmt::print("{}\n", line.dump());
  return 0;
}

int run_tool(int argc, char** argv) {
  Arguments arguments;
  TrainingOptions& training = arguments.training;
  nn::LlamaConfig& model = training.model;
  CLI::App app(
      "Times a training step (forward, backward, clipping, AdamW) of a Llama under fully_shard on\n"
      "NCCL and prints one line of JSON.",
      "step");
  const auto number = [&](const char* name, auto& value, const char* meaning) {
    app.add_option(name, value, meaning)
        ->check(CLI::Range(int64_t{1}, kMost))
        ->capture_default_str();
  };
  number("--dim", model.dim, "width of the residual stream");
  number("--layers", model.n_layers, "blocks");
  number("--heads", model.n_heads, "query heads");
  number("--kv-heads", model.n_kv_heads, "key and value heads");
  number("--hidden", model.hidden_dim, "width of the feed-forward network");
  number("--vocab", model.vocab_size, "tokens in the vocabulary");
  number("--batch", training.batch, "sequences a GPU and step");
  number("--seq", model.max_seq_len, "tokens of a sequence");
  number("--steps", arguments.steps, "steps that are timed");
  number("--warmup", arguments.warmup, "steps before them");
  number("--gpus", arguments.gpus, "one process each, started from here; or use a launcher");
  const auto dtype = [&](const char* name, std::string& value, const char* meaning) {
    app.add_option(name, value, meaning)
        ->check(CLI::IsMember({"bfloat16", "float32"}))
        ->capture_default_str();
  };
  dtype("--param-dtype", arguments.param_dtype, "of gathered parameters and computation");
  dtype("--reduce-dtype", arguments.reduce_dtype, "in which gradients are reduced");
  app.add_option("--optimizer", arguments.optimizer, "implementation of AdamW's step")
      ->check(CLI::IsMember({"fused", "foreach"}))
      ->capture_default_str();
  app.add_flag("--registered-memory", training.registered_memory,
               "communicate from memory that NCCL has made");
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    fmt::print(stderr, "ppfsdp: error: {}\n", error.what());
    return cli::kUsage;
  }
  training.policy = {.param_dtype = dtype_of(arguments.param_dtype),
                     .reduce_dtype = dtype_of(arguments.reduce_dtype)};
  training.optimizer = arguments.optimizer == "fused" ? optim::Implementation::kFused
                                                      : optim::Implementation::kForeach;
  if (arguments.gpus > 1 && std::getenv("RANK") == nullptr) {
    return cli::launch(
        {.processes = arguments.gpus, .prefix_lines = false, .command = {argv + 1, argv + argc}});
  }
  return run(arguments);
}

}  // namespace
}  // namespace ppfsdp::nccl::testing

int main(int argc, char** argv) {
  try {
    ppfsdp::cli::quieten_libtorch();
    return ppfsdp::nccl::testing::run_tool(argc, argv);
  } catch (const std::exception& error) {
    return ppfsdp::cli::report(error);
  }
}
