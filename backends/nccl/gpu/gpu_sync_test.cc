// A training step queues its work and goes on: the host never waits for the device.
#include <ATen/ops/ones.h>
#include <c10/cuda/CUDAFunctions.h>
#include <gtest/gtest.h>

#include <barrier>
#include <string>
#include <vector>

#include "backends/nccl/gpu/loopback.h"
#include "backends/nccl/gpu/profile.h"
#include "backends/nccl/gpu/testing.h"
#include "backends/nccl/gpu/training.h"

namespace ppfsdp::nccl::testing {
namespace {

using c10::cuda::SyncDebugMode;

/// While one is alive, a wait for the device inside LibTorch throws, on every thread.
class NoWaits {
 public:
  NoWaits() { c10::cuda::warning_state().set_sync_debug_mode(SyncDebugMode::L_ERROR); }
  ~NoWaits() { c10::cuda::warning_state().set_sync_debug_mode(SyncDebugMode::L_DISABLED); }
  NoWaits(const NoWaits&) = delete;
  NoWaits& operator=(const NoWaits&) = delete;
};

/// The first steps make what later ones reuse: streams, memory, cuBLAS's workspaces.
constexpr int kWarmUp = 4;
/// Operations whose calls the ranks compare, and wait for each other to do so: fewer than those of
/// the first steps.
constexpr GpuWorldOptions kWorld = {.checked = 8};

TrainingOptions options_for(const fsdp::MixedPrecisionPolicy& policy, bool registered_memory) {
  return {.model = {.vocab_size = 512,
                    .dim = 256,
                    .n_layers = 3,
                    .n_heads = 4,
                    .hidden_dim = 704,
                    .max_seq_len = 64},
          .policy = policy,
          .batch = 2,
          .optimizer = optim::Implementation::kForeach,
          .registered_memory = registered_memory};
}

const std::vector<TrainingOptions> kAll = {
    options_for({}, false), options_for({.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat},
                                        /*registered_memory=*/true)};

// Something in forward, backward, clipping or the optimizer reads a value, copies to the host, or
// synchronises a stream.
TEST(GpuSync, LibTorchWaitsForNothingInAStep) {
  const auto check = [](comm::Runtime& runtime, NcclRuntime& own) {
    for (const TrainingOptions& options : kAll) {
      Training training(options, runtime);
      for (int step = 0; step < kWarmUp; ++step) training.step();
      runtime.compute_stream().synchronize();
      const uint64_t before = own.host_waits();
      {
        const NoWaits no_waits;
        training.step();
      }
      EXPECT_EQ(own.host_waits(), before) << "the backend has waited";
    }
  };
  run_gpus(
      1, [&](NcclRuntime& runtime) { check(runtime, runtime); }, kWorld);
  // With buffers and collectives as several ranks have them.
  run_gpus(
      1,
      [&](NcclRuntime& runtime) {
        Loopback loopback(runtime, 1, 4);
        check(loopback, runtime);
      },
      kWorld);
}

// The check above would see nothing.
TEST(GpuSync, AWaitInLibTorchIsSeen) {
  run_gpus(1, [](NcclRuntime& runtime) {
    const at::Tensor tensor = at::ones({3}, runtime.device());
    const NoWaits no_waits;
    EXPECT_THROW(tensor.sum().item<float>(), c10::Error);
  });
}

// The same by CUDA's own calls, whoever makes them: LibTorch, this backend or NCCL. On all GPUs at
// once; rank 0 looks, while no rank does anything but its step.
TEST(GpuSync, NoCallOfCudaWaitsInAStep) {
  for (const int n : world_sizes()) {
    std::barrier<> together(n);
    Profile seen;
    run_gpus(
        n,
        [&](NcclRuntime& runtime) {
          Training training(kAll[1], runtime);
          for (int step = 0; step < kWarmUp; ++step) training.step();
          runtime.compute_stream().synchronize();
          const uint64_t before = runtime.host_waits();
          const auto step = [&] {
            together.arrive_and_wait();
            training.step();
            together.arrive_and_wait();
          };
          if (runtime.rank() == 0) {
            seen = profile("sync_" + std::to_string(n), runtime, step);
          } else {
            step();
          }
          // Rank 0's profile has waited once before the step and once behind it.
          EXPECT_EQ(runtime.host_waits() - before, runtime.rank() == 0 ? 2u : 0u);
          together.arrive_and_wait();
        },
        kWorld);
    EXPECT_EQ(seen.waits, std::vector<std::string>());
    EXPECT_FALSE(seen.device.empty()) << "no kernels in the profile";
    EXPECT_FALSE(seen.control.empty()) << "CUDA's calls are not in the profile";
    ::testing::Test::RecordProperty("calls_of_cuda_that_wait_on_" + std::to_string(n) + "_gpus",
                                    static_cast<int>(seen.waits.size()));
  }
}

}  // namespace
}  // namespace ppfsdp::nccl::testing
