#include "backends/nccl/gpu/testing.h"

#include <ATen/Context.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <cstdlib>
#include <exception>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>

#include "backends/nccl/cuda_device.h"
#include "src/comm/communicator.h"
#include "src/comm/text.h"

namespace ppfsdp::nccl::testing {

int visible_gpus() { return why_no_cuda() ? 0 : c10::cuda::device_count(); }

std::vector<int> world_sizes() {
  const int gpus = visible_gpus();
  return gpus > 1 ? std::vector<int>{1, gpus} : std::vector<int>{1};
}

Settings settings_for(int rank, int n, const c10::intrusive_ptr<c10d::Store>& store,
                      const GpuWorldOptions& options) {
  const int device = options.on_one_gpu ? 0 : rank;
  Settings settings;
  settings.rank = rank;
  settings.world_size = n;
  settings.store = store;
  settings.tensors = c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device));
  settings.streams = settings.tensors;
  settings.hooks.device_grid = [device] { return device_grid(device); };
  settings.hooks.memory_use = [device] { return memory_use(device); };
  // Each GPU has a generator of its own, which it would be without the other ranks.
  settings.shares_process = false;
  settings.timeout = options.timeout;
  settings.checked = options.checked;
  return settings;
}

std::vector<std::string> errors_on_gpus(int n, const std::function<void(NcclRuntime& runtime)>& fn,
                                        const GpuWorldOptions& options) {
  const std::optional<std::string> reason = why_no_cuda();
  TORCH_CHECK(!reason, "this test needs a GPU: ", *reason);
  const int needed = options.on_one_gpu ? 1 : n;
  TORCH_CHECK(visible_gpus() >= needed, "this test needs ", needed, " GPUs, there are ",
              visible_gpus());
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> errors(n);
  const auto run_rank = [&](int rank) {
    try {
      Settings settings = settings_for(rank, n, store, options);
      use_device(settings.tensors.index());
      const std::unique_ptr<NcclRuntime> runtime = make_runtime(std::move(settings));
      fn(*runtime);
    } catch (const c10::Error& error) {
      errors[rank] = comm::first_line(error.what_without_backtrace());
    } catch (const std::exception& error) {
      errors[rank] = comm::first_line(error.what());
    }
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < n; ++rank) threads.emplace_back(run_rank, rank);
  for (std::thread& thread : threads) thread.join();
  return errors;
}

void run_gpus(int n, const std::function<void(NcclRuntime& runtime)>& fn,
              const GpuWorldOptions& options) {
  for (const std::string& error : errors_on_gpus(n, fn, options)) {
    if (!error.empty()) throw comm::CommError(error);
  }
}

Deterministic::Deterministic() {
  TORCH_CHECK(std::getenv("CUBLAS_WORKSPACE_CONFIG") != nullptr,
              "CUBLAS_WORKSPACE_CONFIG is not set; start the test with :4096:8 there, as its Bazel "
              "target does");
  at::globalContext().setAllowTF32CuBLAS(false);
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
}

Deterministic::~Deterministic() {
  at::globalContext().setDeterministicAlgorithms(false, /*warn_only=*/false);
}

}  // namespace ppfsdp::nccl::testing
