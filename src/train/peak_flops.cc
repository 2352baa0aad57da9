#include "src/train/peak_flops.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <chrono>

namespace ppfsdp::train {

double measure_peak_flops() {
  constexpr int64_t kSize = 768;
  constexpr int kTimes = 6;
  const at::NoGradGuard no_grad;
  const at::Tensor a = at::ones({kSize, kSize});
  double best = 1e30;
  for (int i = 0; i < kTimes; ++i) {
    const auto start = std::chrono::steady_clock::now();
    at::mm(a, a);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    best = std::min(best, taken.count());
  }
  return 2.0 * kSize * kSize * kSize / best;
}

}  // namespace ppfsdp::train
