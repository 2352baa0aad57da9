#include "src/train/schedule.h"

#include <cmath>
#include <numbers>

namespace ppfsdp::train {

double learning_rate(const OptimizerConfig& optimizer, int64_t steps, int64_t step) {
  const int64_t warmup = optimizer.warmup_steps;
  if (step < warmup) {
    return optimizer.lr * (static_cast<double>(step + 1) / static_cast<double>(warmup));
  }
  const double progress = static_cast<double>(step - warmup) / static_cast<double>(steps - warmup);
  const double fall = 1.0 - optimizer.min_lr_ratio;
  if (optimizer.decay == "cosine") {
    const double wave = (1.0 + std::cos(std::numbers::pi * progress)) / 2.0;
    return optimizer.lr * (optimizer.min_lr_ratio + fall * wave);
  }
  if (optimizer.decay == "linear") return optimizer.lr * (1.0 - fall * progress);
  return optimizer.lr;
}

}  // namespace ppfsdp::train
