#include "src/train/peak_flops.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <chrono>
#include <functional>

namespace ppfsdp::train {
namespace {

/// Of `together` products at a time, after which `wait` returns once they are computed.
double measure(int64_t size, const at::TensorOptions& options, int together,
               const std::function<void()>& wait) {
  constexpr int kTimes = 6;
  const at::NoGradGuard no_grad;
  const at::Tensor a = at::ones({size, size}, options);
  wait();
  double best = 1e30;
  for (int i = 0; i < kTimes; ++i) {
    const auto start = std::chrono::steady_clock::now();
    for (int k = 0; k < together; ++k) at::mm(a, a);
    wait();
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    best = std::min(best, taken.count());
  }
  const auto n = static_cast<double>(size);
  return 2.0 * n * n * n * together / best;
}

}  // namespace

double measure_peak_flops() {
  return measure(768, at::kFloat, 1, [] {});
}

double measure_peak_flops(comm::Runtime& runtime, c10::ScalarType dtype) {
  if (runtime.device().is_cpu()) return measure_peak_flops();
  const c10::Device device = runtime.device();
  const double flops = measure(8192, at::TensorOptions(dtype).device(device), 4,
                               [&] { runtime.compute_stream().synchronize(); });
  if (device.is_cuda()) {
    // Half a GiB or more, which is no memory of training.
    c10::DeviceAllocator* const allocator = c10::getDeviceAllocator(device.type());
    allocator->emptyCache();
    allocator->resetPeakStats(device.index());
  }
  return flops;
}

}  // namespace ppfsdp::train
