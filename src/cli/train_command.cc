#include "src/cli/train_command.h"

#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>

#include "src/checkpoint/load_weights.h"
#include "src/cli/report.h"
#include "src/cli/runtimes.h"
#include "src/cli/stop_signal.h"
#include "src/nn/llama_config.h"
#include "src/train/data_loader.h"
#include "src/train/metrics.h"
#include "src/train/peak_flops.h"
#include "src/train/rank_memory.h"
#include "src/train/recipe.h"
#include "src/train/trainer.h"

namespace ppfsdp::cli {
namespace {

using train::Config;

/// FLOP/s of the devices that the ranks compute on; 0 of GPUs, which are there once ranks run.
/// Ranks on the simulated mesh take turns on one core; processes have one each, as far as there are
/// cores.
double peak_flops(const RunPlan& plan) {
  const Config& config = plan.config;
  if (config.metrics.peak_tflops > 0) return config.metrics.peak_tflops * 1e12;
  if (config.communication.backend == "nccl") return 0;
  int64_t cores = 1;
  if (plan.one_process_a_rank()) {
    cores = std::min<int64_t>(config.parallelism.ranks,
                              std::max(1u, std::thread::hardware_concurrency()));
  }
  return train::measure_peak_flops() * static_cast<double>(cores);
}

std::unique_ptr<train::Metrics> open_metrics(const RunPlan& plan, const nn::LlamaConfig& model) {
  const Config& config = plan.config;
  train::MetricsScale scale;
  scale.steps = config.training.steps;
  scale.tokens_per_step = config.training.global_batch * config.data.seq_len;
  scale.flops_per_token = nn::flops_per_token(model, config.data.seq_len);
  scale.peak_flops = peak_flops(plan);
  return std::make_unique<train::Metrics>(config.metrics, scale, stdout, stderr);
}

void print_start(const Config& config, const nn::LlamaConfig& model,
                 const train::DataLoader& data) {
  fmt::print(
      "model: {} ({:.2f} M parameters)  data: {:.2f} M tokens in {} files  batch: {} x {} tokens  "
      "backend: {}, {} rank{}\n",
      config.model.name, static_cast<double>(nn::parameter_count(model)) / 1e6,
      static_cast<double>(data.data().size()) / 1e6, data.data().paths().size(),
      config.training.global_batch, config.data.seq_len, config.communication.backend,
      config.parallelism.ranks, config.parallelism.ranks == 1 ? "" : "s");
  std::fflush(stdout);
}

/// A load that changed dtypes says so.
void print_converted(const Config& config, const checkpoint::LoadReport& report) {
  if (report.converted.empty()) return;
  fmt::print("weights: {}  tensors converted: {}, the first {}\n", config.model.weights,
             report.converted.size(), report.converted[0]);
  std::fflush(stdout);
}

/// What training would hold, counted without any of it.
void print_memory(const RunPlan& plan) {
  constexpr double kGiB = 1 << 30;
  const Config& config = plan.config;
  run_ranks(plan, [&](comm::Runtime& runtime) {
    const train::RankMemory memory = train::count_rank_memory(config, runtime);
    // Rows are dealt from the front, so no rank holds more than the first.
    if (runtime.rank() != 0) return;
    fmt::print("model: {} ({:.2f} M parameters)  backend: {}, {} rank{}  groups: {}\n",
               config.model.name, static_cast<double>(memory.parameters) / 1e6,
               config.communication.backend, config.parallelism.ranks,
               config.parallelism.ranks == 1 ? "" : "s", memory.groups);
    fmt::print(
        "a rank holds {:.2f} GiB: parameters {:.2f}, gradients {:.2f}, optimizer state {:.2f}; all "
        "ranks together {:.2f} GiB\n",
        memory.held_bytes() / kGiB, memory.parameter_bytes / kGiB, memory.gradient_bytes / kGiB,
        memory.optimizer_bytes / kGiB,
        static_cast<double>(config.parallelism.ranks) * memory.held_bytes() / kGiB);
    fmt::print(
        "on top, while it computes: activations, and gathered groups of at most {:.2f} GiB\n",
        memory.largest_group_bytes / kGiB);
  });
}

}  // namespace

int train_command(const ConfigOptions& options) {
  const RunPlan plan = read_config(options, launched_process());
  const Config& config = plan.config;
  if (options.print_config) {
    if (plan.leads()) fmt::print("{}", train::to_toml(config));
    return kSuccess;
  }
  if (options.dry_run) {
    print_memory(plan);
    return kSuccess;
  }
  const nn::LlamaConfig model = train::model_config(config);
  const train::DataLoader data(config, model.vocab_size);
  const bool leader = plan.leads();  // alone prints and writes metrics
  std::unique_ptr<train::Metrics> metrics;
  if (leader) {
    metrics = open_metrics(plan, model);
    print_start(config, model, data);
  }
  train::StepResult last;
  run_ranks(plan, [&](comm::Runtime& runtime) {
    // From here on: a process that still waits for other ranks may end at once.
    const std::atomic<int>& stop_signal = catch_stop_signals();
    if (runtime.rank() == 0 && !runtime.device().is_cpu() && config.metrics.peak_tflops == 0) {
      const auto dtype = train::mixed_precision(config.training).param_dtype.value_or(at::kFloat);
      metrics->set_peak_flops(train::measure_peak_flops(runtime, dtype) *
                              static_cast<double>(config.parallelism.ranks));
    }
    train::Trainer trainer(config, data, runtime);
    train::TrainOptions train_options{.stop_signal = &stop_signal};
    if (runtime.rank() == 0) {
      print_converted(config, trainer.load_report());
      train_options.on_step = [&](const train::StepResult& step) {
        metrics->step(step.step + 1, step.loss, step.grad_norm, step.lr, step.seconds, step.memory);
      };
    }
    const train::StepResult result = train::train(trainer, config.training.steps, train_options);
    if (runtime.rank() == 0 || plan.one_process_a_rank()) last = result;
  });

  const int64_t done = last.step + 1;
  if (leader) metrics->finish();
  if (last.stop_signal == 0 || done == config.training.steps) return kSuccess;
  if (leader) {
    fmt::print(stderr, "ppfsdp: stopped by {} after step {} of {}\n",
               last.stop_signal == SIGINT ? "SIGINT" : "SIGTERM", done, config.training.steps);
  }
  return 128 + last.stop_signal;
}

}  // namespace ppfsdp::cli
