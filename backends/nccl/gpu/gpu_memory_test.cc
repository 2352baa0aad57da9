// The memory that sharding takes on a GPU, by the caching allocator's own count.
#include <c10/core/CachingDeviceAllocator.h>
#include <gtest/gtest.h>

#include <mutex>
#include <string>

#include "backends/nccl/gpu/loopback.h"
#include "backends/nccl/gpu/memory_bounds.h"
#include "backends/nccl/gpu/testing.h"

namespace ppfsdp::nccl::testing {
namespace {

// Few tokens and wide layers (a block has 205 MB): parameters outweigh all else, and a gathered
// block too many is more than what the allowance for activations and rounding hides (60 MB).
const TrainingOptions kOptions = {.model = {.vocab_size = 2048,
                                            .dim = 2048,
                                            .n_layers = 6,
                                            .n_heads = 16,
                                            .hidden_dim = 5632,
                                            .max_seq_len = 8}};

/// The caching allocator leaves up to a MiB of a block unused rather than split it off.
constexpr int64_t kSlack = int64_t{1} << 20;

MemoryMeter meter_of(c10::Device device) {
  const auto stats = [device] {
    const auto all = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
    return all.active_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  };
  return {.now = [stats] { return stats().current; },
          .peak = [stats] { return stats().peak; },
          .reset =
              [device] { c10::getDeviceAllocator(device.type())->resetPeakStats(device.index()); }};
}

void check(comm::Runtime& runtime, const std::string& name) {
  for (const Phase& phase : measure_phases(kOptions, runtime, meter_of(runtime.device()), kSlack)) {
    EXPECT_LE(phase.peak, phase.bound) << phase.name;
    EXPECT_GT(phase.peak, 0) << phase.name << ": the allocator's count stands still";
    if (runtime.rank() != 0) continue;
    const std::string prefix = name + "_" + phase.name;
    ::testing::Test::RecordProperty(prefix + "_peak", std::to_string(phase.peak));
    ::testing::Test::RecordProperty(prefix + "_bound", std::to_string(phase.bound));
  }
}

// A buffer that is kept longer than it is needed, or given back later than it was thought.
TEST(GpuMemory, OfOneRankOfEight) {
  run_gpus(1, [](NcclRuntime& runtime) {
    Loopback loopback(runtime, /*rank=*/0, /*world_size=*/8);
    check(loopback, "one_of_eight");
  });
}

TEST(GpuMemory, OfAllGpus) {
  if (visible_gpus() == 1) GTEST_SKIP() << "needs two GPUs, there is 1";
  run_gpus(visible_gpus(), [](NcclRuntime& runtime) { check(runtime, "all"); });
}

// On one rank the parameters are the shards, and no copy of them is made.
TEST(GpuMemory, OneRankGathersNothing) {
  run_gpus(1, [](NcclRuntime& runtime) { check(runtime, "alone"); });
}

}  // namespace
}  // namespace ppfsdp::nccl::testing
