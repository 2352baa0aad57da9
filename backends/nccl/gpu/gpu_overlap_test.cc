// Communication runs beside computation. Each test leaves a trace of a step in its outputs.
#include <gtest/gtest.h>

#include <barrier>
#include <map>
#include <string>
#include <vector>

#include "backends/nccl/gpu/loopback.h"
#include "backends/nccl/gpu/profile.h"
#include "backends/nccl/gpu/testing.h"
#include "backends/nccl/gpu/training.h"

namespace ppfsdp::nccl::testing {
namespace {

const fsdp::MixedPrecisionPolicy kMixed = {.param_dtype = at::kBFloat16,
                                           .reduce_dtype = at::kFloat};

/// Blocks of 51 million parameters and a batch of 8192 tokens: computing one block's forward takes
/// a GPU longer (a millisecond and more) than the host needs to queue it, so that what the host has
/// queued on other streams is there by the time at which it may run.
TrainingOptions options_for(const fsdp::MixedPrecisionPolicy& policy) {
  return {.model = {.vocab_size = 4096,
                    .dim = 2048,
                    .n_layers = 4,
                    .n_heads = 16,
                    .hidden_dim = 5632,
                    .max_seq_len = 1024},
          .policy = policy,
          .batch = 8};
}

/// A step after some that make what later ones reuse.
Profile profile_of_step(const std::string& name, Training& training, comm::Runtime& runtime) {
  for (int step = 0; step < 3; ++step) training.step();
  return profile(name, runtime, [&] { training.step(); });
}

/// By stream, but for the one that computes.
std::map<int64_t, std::vector<Interval>> side_streams(const Profile& seen) {
  const int64_t compute = busiest_stream(seen.device);
  std::map<int64_t, std::vector<Interval>> result;
  for (const Interval& interval : seen.device) {
    if (interval.stream != compute) result[interval.stream].push_back(interval);
  }
  return result;
}

std::vector<Interval> on_stream(const Profile& seen, int64_t stream) {
  std::vector<Interval> result;
  for (const Interval& interval : seen.device) {
    if (interval.stream == stream) result.push_back(interval);
  }
  return result;
}

/// Every side stream works beside the one that computes; there are `least` at the least.
void expect_side_streams_overlap(const Profile& seen, size_t least) {
  const auto side = side_streams(seen);
  const std::vector<Interval> compute = on_stream(seen, busiest_stream(seen.device));
  EXPECT_GE(side.size(), least) << "streams that something ran on beside the computing one";
  for (const auto& [stream, intervals] : side) {
    const Overlap found = overlap(intervals, compute);
    EXPECT_GT(found.overlapped, 0) << "stream " << stream << ": " << to_string(found);
    ::testing::Test::RecordProperty("overlapped_on_stream_" + std::to_string(stream),
                                    to_string(found));
  }
}

// A wait of the computing stream for a gather or a reduction that it does not need yet, or gathers
// that are queued too late. As one rank of four: the gathers' stream and the reductions'.
TEST(GpuOverlap, OfOneRankOfFour) {
  run_gpus(1, [](NcclRuntime& runtime) {
    Loopback loopback(runtime, /*rank=*/1, /*world_size=*/4);
    Training training(options_for({}), loopback);
    expect_side_streams_overlap(profile_of_step("one_of_four", training, loopback), 2);
  });
}

// In a world of one NCCL has nothing to gather; what is left of a gather is the cast to bfloat16.
TEST(GpuOverlap, OfTheCastBeforeAGather) {
  run_gpus(1, [](NcclRuntime& runtime) {
    Training training(options_for(kMixed), runtime);
    expect_side_streams_overlap(profile_of_step("cast", training, runtime), 1);
  });
}

// NCCL's own kernels, beside any others.
TEST(GpuOverlap, OfNccl) {
  const int n = visible_gpus();
  if (n == 1) GTEST_SKIP() << "needs two GPUs, there is 1: NCCL runs no kernel in a world of one";
  std::barrier<> together(n);
  Profile seen;
  run_gpus(n, [&](NcclRuntime& runtime) {
    Training training(options_for(kMixed), runtime);
    if (runtime.rank() == 0) {
      seen = profile_of_step("nccl", training, runtime);
    } else {
      for (int step = 0; step < 4; ++step) training.step();
      runtime.compute_stream().synchronize();
    }
    together.arrive_and_wait();
  });
  for (const char* kind : {"AllGather", "ReduceScatter"}) {
    std::vector<Interval> communication, computation;
    for (const Interval& interval : seen.device) {
      const bool of_nccl = interval.name.find("nccl") != std::string::npos;
      if (of_nccl && interval.name.find(kind) != std::string::npos) {
        communication.push_back(interval);
      } else if (!of_nccl) {
        computation.push_back(interval);
      }
    }
    const Overlap found = overlap(communication, computation);
    EXPECT_GT(found.overlapped, 0) << kind << ": " << to_string(found);
    RecordProperty(std::string(kind) + "_overlapped", to_string(found));
  }
}

}  // namespace
}  // namespace ppfsdp::nccl::testing
