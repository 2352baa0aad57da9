// What goes wrong ends in an error on every rank, in time, and leaves the GPU usable.
#include <ATen/cuda/Sleep.h>
#include <ATen/ops/ones.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "backends/gloo/testing/thread_world.h"
#include "backends/nccl/cuda_device.h"
#include "backends/nccl/gpu/testing.h"
#include "backends/nccl/nccl.h"
#include "src/comm/communicator.h"

namespace ppfsdp::nccl::testing {
namespace {

using comm::CommError;
using comm::ReduceOp;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// The text of the CommError that `function` throws.
template <typename Function>
std::string error_of(const Function& function) {
  try {
    function();
  } catch (const CommError& error) {
    return error.what();
  }
  return "no error";
}

/// Fails unless a new world works.
void expect_usable() {
  run_gpus(1, [](NcclRuntime& runtime) {
    const at::Tensor tensor = at::ones({5}, runtime.device());
    runtime.world()->all_reduce(tensor, ReduceOp::sum(), runtime.compute_stream());
    EXPECT_EQ(tensor.sum().item<float>(), 5);
  });
}

at::Tensor ones(comm::Runtime& runtime) { return at::ones({1000}, runtime.device()); }

// A start would hang.
TEST(GpuFault, ARankThatNeverComes) {
  NcclOptions options;
  options.world_size = 2;
  options.timeout = seconds(2);
  options.listen_fd = gloo::testing::listen_on_free_port(options.master_port);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THAT(error_of([&] { make_runtime(options); }), HasSubstr("rank 1"));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(30));
  expect_usable();
}

// ncclCommInitRank, which waits for the other for ever, would not be ended.
TEST(GpuFault, ARankThatComesButDoesNotStartNccl) {
  const GpuWorldOptions options = {.timeout = seconds(3)};
  use_device(0);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_THAT(error_of([&] { make_runtime(settings_for(0, 2, store, options)); }),
              AllOf(HasSubstr("was not done within 3 s"), HasSubstr("rank 1 had not come"),
                    HasSubstr("this is rank 0")));
  expect_usable();
}

// NCCL refuses two ranks on one GPU. A rank that does not hear of it would wait.
TEST(GpuFault, AnErrorOfNcclReachesEveryRank) {
  const auto nothing = [](NcclRuntime&) {};
  const std::vector<std::string> errors =
      errors_on_gpus(2, nothing, {.timeout = seconds(20), .on_one_gpu = true});
  EXPECT_THAT(errors[0], HasSubstr("this is rank 0"));
  EXPECT_THAT(errors[1], HasSubstr("this is rank 1"));
  for (const std::string& error : errors) EXPECT_THAT(error, Not(HasSubstr("was not done within")));
  expect_usable();
}

// An operation that hangs on the GPU would hang whoever waits for it.
TEST(GpuFault, AnOperationThatIsNotDoneInTime) {
  // NCCL's first start in a process takes longer than its later ones.
  expect_usable();
  const GpuWorldOptions options = {.timeout = seconds(3)};
  const auto hang = [](NcclRuntime& runtime) {
    const auto stream = runtime.create_stream("slow", comm::StreamPriority::kNormal);
    const at::Tensor tensor = ones(runtime);
    stream->wait(runtime.compute_stream().record());
    // A GPU's clock is at most about 2 GHz: 8 s or more.
    stream->run([] { at::cuda::sleep(int64_t{16'000'000'000}); });
    runtime.world()->all_reduce(tensor, ReduceOp::sum(), *stream);
    const std::string error = error_of([&] { stream->synchronize(); });
    EXPECT_THAT(error, AllOf(HasSubstr("all_reduce"), HasSubstr("'world'"),
                             HasSubstr("was not done within 3 s"), HasSubstr("this is rank 0")));
    EXPECT_EQ(error_of([&] { runtime.world()->barrier(); }), error) << "it is forgotten again";
  };
  EXPECT_EQ(errors_on_gpus(1, hang, options), std::vector<std::string>{""});
  expect_usable();
}

// The others would wait for a rank that has left until their timeout.
TEST(GpuFault, AnExceptionOnOneRankEndsAll) {
  const int n = visible_gpus();
  if (n == 1) GTEST_SKIP() << "needs two GPUs, there is 1";
  const auto begin = std::chrono::steady_clock::now();
  const auto fail_on_one = [n](NcclRuntime& runtime) {
    const at::Tensor tensor = ones(runtime);
    runtime.world()->all_reduce(tensor, ReduceOp::sum(), runtime.compute_stream());
    if (runtime.rank() == n - 1) throw std::runtime_error("its own error");
    runtime.world()->all_reduce(tensor, ReduceOp::sum(), runtime.compute_stream());
    runtime.compute_stream().synchronize();
  };
  const std::vector<std::string> errors = errors_on_gpus(n, fail_on_one, {.timeout = seconds(60)});
  for (int rank = 0; rank < n - 1; ++rank) {
    EXPECT_THAT(errors[rank], HasSubstr("rank " + std::to_string(n - 1)));
  }
  EXPECT_EQ(errors[n - 1], "its own error");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(50));
  expect_usable();
}

// Ends of worlds would leave memory behind, or hang.
TEST(GpuFault, AWorldThatEndsGivesAllBack) {
  const auto held = [] {
    const auto stats = c10::getDeviceAllocator(c10::kCUDA)->getDeviceStats(0);
    return stats.allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)]
        .current;
  };
  std::vector<int64_t> after;
  for (int world = 0; world < 3; ++world) {
    run_gpus(1, [](NcclRuntime& runtime) {
      const auto group = runtime.world()->subgroup({0}, "group");
      const auto stream = runtime.create_stream("side", comm::StreamPriority::kHigh);
      const at::Tensor registered = group->allocate(1 << 20, at::kFloat, *stream);
      stream->run([registered] { registered.fill_(2); });
      group->all_reduce(registered, ReduceOp::sum(), *stream);
      group->barrier();
      runtime.compute_stream().wait(stream->record());
      EXPECT_EQ(registered.sum().item<float>(), 2 << 20);
    });
    after.push_back(held());
  }
  EXPECT_EQ(after[1], after[0]);
  EXPECT_EQ(after[2], after[0]);
}

}  // namespace
}  // namespace ppfsdp::nccl::testing
