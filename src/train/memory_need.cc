#include "src/train/memory_need.h"

#include <fmt/format.h>

#include "src/nn/llama_config.h"
#include "src/train/recipe.h"

namespace ppfsdp::train {
namespace {

double parameters(const Config& config) {
  return static_cast<double>(nn::parameter_count(model_config(config)));
}

}  // namespace

int state_values(const OptimizerConfig& optimizer) {
  if (optimizer.name == "adamw") return 2;
  return optimizer.momentum != 0 ? 1 : 0;
}

double least_bytes(const Config& config) {
  return parameters(config) * sizeof(float) * (2 + state_values(config.optimizer));
}

std::string refuse_memory(const Config& config, double machine, int64_t processes) {
  double share = 1;
  if (config.communication.backend == "gloo") {
    share = static_cast<double>(processes) / static_cast<double>(config.parallelism.ranks);
  }
  const double need = least_bytes(config) * share;
  if (need <= machine) return "";
  constexpr double kGiB = 1 << 30;
  return fmt::format(
      "training model.name = \"{}\" needs at least {:.1f} GiB of memory on this machine, which has "
      "{:.1f} GiB: {:.2f} G parameters, their gradients and {} value(s) of optimizer state each, "
      "in "
      "float32{}; choose a smaller model, or more machines",
      config.model.name, need / kGiB, machine / kGiB, parameters(config) / 1e9,
      state_values(config.optimizer),
      share < 1 ? fmt::format(", {} of {} ranks", processes, config.parallelism.ranks) : "");
}

}  // namespace ppfsdp::train
