#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "backends/nccl/runtime.h"

namespace ppfsdp::nccl::testing {

/// The number of GPUs that this process sees; 0 where there is none, or no driver.
int visible_gpus();

/// 1, and the number of visible GPUs if it is more.
std::vector<int> world_sizes();

struct GpuWorldOptions {
  /// See NcclOptions. A step that must not wait for the device has to be past these operations.
  uint64_t checked = 16;
  std::chrono::milliseconds timeout{std::chrono::seconds(60)};
  /// Whether all ranks have GPU 0, which NCCL refuses.
  bool on_one_gpu = false;
};

/// What a rank of such a world is made of.
Settings settings_for(int rank, int n, const c10::intrusive_ptr<c10d::Store>& store,
                      const GpuWorldOptions& options);

/// Runs `fn` on `n` ranks of the NCCL backend, threads of this process of which rank r has GPU r.
/// Returns when all have ended: the first line of what each threw, "" of those that threw nothing.
/// c10::Error where there are fewer GPUs: a test that needs one must not pass without.
std::vector<std::string> errors_on_gpus(int n, const std::function<void(NcclRuntime& runtime)>& fn,
                                        const GpuWorldOptions& options = {});

/// The same; throws a CommError with the first of the errors.
void run_gpus(int n, const std::function<void(NcclRuntime& runtime)>& fn,
              const GpuWorldOptions& options = {});

/// While one is alive, LibTorch's operations give the same bits each time, or throw; and float32
/// products are of float32 values (no TF32).
///
/// Of a Llama's operations these have another form for it: attention's backward (flash and
/// memory-efficient attention add up the gradient of the queries in no fixed order otherwise), and
/// products, for which cuBLAS must have a workspace a stream: CUBLAS_WORKSPACE_CONFIG, read when it
/// starts, which these tests' Bazel targets set. Memory of at::empty is filled with NaN meanwhile.
class Deterministic {
 public:
  Deterministic();
  ~Deterministic();
  Deterministic(const Deterministic&) = delete;
  Deterministic& operator=(const Deterministic&) = delete;
};

}  // namespace ppfsdp::nccl::testing
