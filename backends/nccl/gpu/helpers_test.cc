// What the tests on GPUs are made of, on the CPU: a fault here would let them pass or fail for the
// wrong reason.
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "backends/nccl/gpu/loopback.h"
#include "backends/nccl/gpu/memory_bounds.h"
#include "backends/nccl/gpu/profile.h"
#include "backends/nccl/gpu/training.h"
#include "src/comm/single_runtime.h"
#include "src/dtensor/dtensor.h"

namespace ppfsdp::nccl::testing {
namespace {

const nn::LlamaConfig kModel = {
    .vocab_size = 64, .dim = 32, .n_layers = 3, .n_heads = 2, .hidden_dim = 88, .max_seq_len = 4};

/// The CPU's allocator, with a count of the bytes that it has given out.
class CountingAllocator : public c10::Allocator {
 public:
  CountingAllocator() : inner_(c10::GetCPUAllocator()) {
    c10::SetCPUAllocator(this, /*priority=*/100);
  }
  ~CountingAllocator() override { c10::SetCPUAllocator(inner_, /*priority=*/100); }

  c10::DataPtr allocate(size_t bytes) override {
    auto* block = new Block{inner_->allocate(bytes), static_cast<int64_t>(bytes), this};
    now_ += block->bytes;
    peak_ = std::max(peak_.load(), now_.load());
    return {block->memory.get(), block, &CountingAllocator::free, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }

  MemoryMeter meter() {
    return {.now = [this] { return now_.load(); },
            .peak = [this] { return peak_.load(); },
            .reset = [this] { peak_ = now_.load(); }};
  }

 private:
  struct Block {
    c10::DataPtr memory;
    int64_t bytes;
    CountingAllocator* owner;
  };
  static void free(void* context) {
    auto* block = static_cast<Block*>(context);
    block->owner->now_ -= block->bytes;
    delete block;
  }

  c10::Allocator* inner_;
  std::atomic<int64_t> now_{0}, peak_{0};
};

TEST(MemoryBounds, HoldOnTheCpuToo) {
  // Large enough that parameters outweigh activations.
  const nn::LlamaConfig model = {.vocab_size = 256,
                                 .dim = 256,
                                 .n_layers = 6,
                                 .n_heads = 2,
                                 .hidden_dim = 704,
                                 .max_seq_len = 2};
  CountingAllocator allocator;
  const auto own = comm::make_single_runtime();
  for (const bool registered : {false, true}) {
    Loopback loopback(*own, /*rank=*/3, /*world_size=*/8);
    for (const Phase& phase : measure_phases({.model = model, .registered_memory = registered},
                                             loopback, allocator.meter(), /*slack=*/64)) {
      EXPECT_LE(phase.peak, phase.bound) << phase.name;
      EXPECT_GE(phase.peak, phase.bound / 2) << phase.name << ": something is not counted";
    }
  }
}

TEST(Training, IsTheSameEachTimeAndLearns) {
  const auto own = comm::make_single_runtime();
  const TrainingOptions options = {.model = kModel, .batch = 2};
  Training first(options, *own), second(options, *own);
  std::vector<double> losses;
  for (int step = 0; step < 5; ++step) {
    first.step();
    second.step();
    losses.push_back(first.loss().item<double>());
    EXPECT_EQ(losses.back(), second.loss().item<double>());
    EXPECT_EQ(first.grad_norm().item<double>(), second.grad_norm().item<double>());
  }
  EXPECT_LT(losses.back(), losses.front());
}

// Buffers would not have the sizes that they have on several ranks.
TEST(Loopback, IsARankAmongItsCopies) {
  const auto own = comm::make_single_runtime();
  Loopback loopback(*own, /*rank=*/1, /*world_size=*/4);
  EXPECT_EQ(loopback.rank(), 1);
  EXPECT_EQ(loopback.world_size(), 4);
  comm::Communicator& world = *loopback.world();
  comm::Stream& stream = loopback.compute_stream();
  const at::Tensor part = at::tensor({1.0, 2.0});
  const at::Tensor all = world.all_gather(part, stream);
  EXPECT_TRUE(all.equal(part.repeat({4})));
  all.zero_();
  const at::Tensor slot = all.narrow(0, 2, 2);
  slot.copy_(part);
  world.all_gather_into(all, slot, stream);
  EXPECT_TRUE(all.equal(part.repeat({4})));
  const at::Tensor rows = world.all_gather(at::ones({2, 3}), stream);
  EXPECT_TRUE(rows.equal(at::ones({24})));
  const at::Tensor table = at::zeros({8, 3});
  world.all_gather_into(table, at::ones({2, 3}), stream);
  EXPECT_TRUE(table.equal(at::ones({8, 3})));
  const at::Tensor mine = at::zeros({2}, at::kDouble);
  world.reduce_scatter(mine, at::arange(8).to(at::kDouble), comm::ReduceOp::avg(), stream);
  EXPECT_TRUE(mine.equal(at::tensor({2.0, 3.0})));
  world.all_reduce(mine, comm::ReduceOp::sum(), stream);
  EXPECT_TRUE(mine.equal(at::tensor({8.0, 12.0})));
  world.all_reduce(mine, comm::ReduceOp::max(), stream);
  EXPECT_TRUE(mine.equal(at::tensor({8.0, 12.0})));
  EXPECT_EQ(world.subgroup({1, 3}, "odd")->rank(), 0);
  EXPECT_THROW(world.broadcast(mine, 0, stream), c10::Error);
}

// What lies beside work on the same stream, or touches it only, is no overlap; time is not counted
// twice where several others run.
TEST(Overlap, IsTimeWithOtherStreams) {
  const std::vector<Interval> what = {{"a", 7, 0, 10}, {"b", 7, 20, 30}, {"c", 7, 40, 50}};
  const std::vector<Interval> others = {
      {"own", 7, 0, 50}, {"x", 1, 2, 6}, {"y", 2, 4, 8}, {"touches", 1, 10, 20}, {"z", 1, 45, 90}};
  const Overlap found = overlap(what, others);
  EXPECT_EQ(found.count, 3);
  EXPECT_EQ(found.overlapped, 2);
  EXPECT_EQ(found.total, 30);
  EXPECT_EQ(found.together, 6 + 5);
  EXPECT_EQ(to_string(found), "2 of 3, 37 % of 0.000 ms");
  EXPECT_EQ(busiest_stream(others), 1);
}

TEST(Profile, WritesATraceOfTheStep) {
  const auto own = comm::make_single_runtime();
  Training training({.model = kModel}, *own);
  const Profile seen = profile("helpers", *own, [&] { training.step(); });
  EXPECT_TRUE(seen.device.empty());
  EXPECT_TRUE(seen.waits.empty());
  const char* folder = std::getenv("TEST_UNDECLARED_OUTPUTS_DIR");
  if (folder == nullptr) GTEST_SKIP() << "no folder for outputs";
  std::ifstream file(std::string(folder) + "/helpers.json");
  const nlohmann::json trace = nlohmann::json::parse(file);
  int steps = 0;
  for (const auto& event : trace["traceEvents"]) {
    if (event.value("name", "") == "ppfsdp: step") ++steps;
  }
  EXPECT_EQ(steps, 1);
}

}  // namespace
}  // namespace ppfsdp::nccl::testing
