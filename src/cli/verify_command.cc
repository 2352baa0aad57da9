#include "src/cli/verify_command.h"

#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>

#include "src/cli/report.h"
#include "src/cli/runtimes.h"
#include "src/nn/llama_config.h"
#include "src/train/config_error.h"
#include "src/train/data_loader.h"
#include "src/train/recipe.h"

namespace ppfsdp::cli {
namespace {

std::string line_of(const train::StepVerdict& verdict, train::VerifyMode mode) {
  const train::StepResult& sharded = verdict.sharded;
  std::string line = fmt::format(
      "step: {:2}  loss: {:.7g} (one device {:.7g})  grad_norm: {:.7g} ({:.7g})  gradients: {} "
      "ulps, {:.2g}  parameters: {} ulps, {:.2g}",
      sharded.step + 1, sharded.loss, verdict.expected_loss, sharded.grad_norm,
      verdict.expected_grad_norm, verdict.gradient_ulps, verdict.gradient_abs,
      verdict.parameter_ulps, verdict.parameter_abs);
  if (mode == train::VerifyMode::kTolerance) {
    line +=
        fmt::format("  allowed: loss {:.1e}, grad_norm {:.1e}; gradients take {:.0f}%",
                    verdict.allowed_loss, verdict.allowed_grad_norm, 100 * verdict.gradient_share);
  }
  return line + (verdict.first_difference.empty() ? "  ok" : "  DIFFERS");
}

}  // namespace

RunPlan read_verify_config(const ConfigOptions& options, train::VerifyMode mode,
                           const std::optional<start::Launched>& launched) {
  RunPlan plan = read_config(options, launched);
  const train::Config& config = plan.config;
  if (config.communication.backend == "single") {
    throw train::ConfigError(
        "communication.backend = \"single\" shards nothing, so there is nothing to verify; use "
        "\"sim\", or \"gloo\" under a launcher");
  }
  if (config.optimizer.implementation == "fused" && config.parallelism.ranks > 1) {
    throw train::ConfigError(fmt::format(
        "optimizer.implementation = \"fused\" cannot be verified {} on {} ranks: LibTorch's fused "
        "kernels round the last elements of a shard otherwise than those before, so parameters "
        "depend on the sharding in their last bits; use \"foreach\" or \"for-loop\"",
        mode == train::VerifyMode::kExact ? "bit for bit" : "step by step",
        config.parallelism.ranks));
  }
  return plan;
}

int verify_command(const ConfigOptions& options, train::VerifyMode mode) {
  const RunPlan plan = read_verify_config(options, mode, launched_process());
  const train::Config& config = plan.config;
  if (options.print_config) {
    if (plan.leads()) fmt::print("{}", train::to_toml(config));
    return kSuccess;
  }
  const train::DataLoader data(config, train::model_config(config).vocab_size);
  std::string first_difference;
  run_ranks(plan, [&](comm::Runtime& runtime) {
    train::Verifier verifier(config, data, runtime, mode);
    if (runtime.rank() == 0) {
      fmt::print("{} on {} ranks of {} against one device, {}\n", config.model.name,
                 runtime.world_size(), runtime.backend(),
                 mode == train::VerifyMode::kExact ? "bit for bit" : "within tolerance");
    }
    for (int64_t step = 0; step < config.training.steps; ++step) {
      const std::optional<train::StepVerdict> verdict = verifier.step();
      if (!verdict) continue;
      if (first_difference.empty()) first_difference = verdict->first_difference;
      fmt::print("{}\n", line_of(*verdict, mode));
      std::fflush(stdout);
    }
    if (runtime.rank() == 0 && first_difference.empty()) {
      fmt::print("equal{}: {} steps\n",
                 mode == train::VerifyMode::kExact ? " bit for bit" : " within tolerance",
                 config.training.steps);
    }
  });
  if (first_difference.empty()) return kSuccess;
  fmt::print(stderr, "ppfsdp: error: {}\n", first_difference);
  return kFailure;
}

}  // namespace ppfsdp::cli
