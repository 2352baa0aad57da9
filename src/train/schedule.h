#pragma once

#include <cstdint>

#include "src/train/config.h"

namespace ppfsdp::train {

/// The learning rate of step 0, 1, ..., steps - 1.
///
/// Warm-up: lr (step + 1) / warmup_steps for the first warmup_steps steps. After it, with p =
/// (step - warmup_steps) / (steps - warmup_steps) from 0 towards 1 and m = min_lr_ratio: cosine
/// lr (m + (1 - m) (1 + cos(pi p)) / 2), linear lr (1 - (1 - m) p), none lr. The first step after
/// warm-up has lr itself, and the decay would reach m lr at step number `steps`, so that no step is
/// spent at zero.
double learning_rate(const OptimizerConfig& optimizer, int64_t steps, int64_t step);

}  // namespace ppfsdp::train
