#include "src/train/memory_need.h"

#include <fmt/format.h>

#include "src/nn/llama_config.h"
#include "src/train/recipe.h"

namespace ppfsdp::train {
namespace {

double parameters(const Config& config) {
  return static_cast<double>(nn::parameter_count(model_config(config)));
}

/// `holders` of `ranks` ranks are where there are `bytes` bytes.
std::string refuse(const Config& config, double bytes, int64_t holders, int64_t ranks,
                   const std::string& where, const std::string& more_of) {
  const double need =
      least_bytes(config) * static_cast<double>(holders) / static_cast<double>(ranks);
  if (need <= bytes) return "";
  constexpr double kGiB = 1 << 30;
  return fmt::format(
      "training model.name = \"{}\" needs at least {:.1f} GiB of memory on {}, which has {:.1f} "
      "GiB: {:.2f} G parameters, their gradients and {} value(s) of optimizer state each, in "
      "float32{}; choose a smaller model, or more {}",
      config.model.name, need / kGiB, where, bytes / kGiB, parameters(config) / 1e9,
      state_values(config.optimizer),
      holders < ranks ? fmt::format(", {} of {} ranks", holders, ranks) : "", more_of);
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
  const bool shares = config.communication.backend == "gloo";
  return refuse(config, machine, processes, shares ? config.parallelism.ranks : processes,
                "this machine", "machines");
}

std::string refuse_device_memory(const Config& config, const comm::Runtime& runtime) {
  const c10::Device device = runtime.device();
  if (device.is_cpu() || device.is_meta()) return "";
  return refuse(config, static_cast<double>(runtime.memory_use().total_bytes), 1,
                runtime.world_size(), device.str(), "devices");
}

}  // namespace ppfsdp::train
