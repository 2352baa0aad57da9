#include "src/comm/host_allocator.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sum.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <thread>
#include <vector>

namespace ppfsdp::comm {
namespace {

class HostAllocator : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { reuse_tensor_memory(); }
};

TEST_F(HostAllocator, GivesABlockAgain) {
  const void* first = nullptr;
  for (int i = 0; i < 3; ++i) {
    const at::Tensor tensor = at::empty({1000});
    if (first == nullptr) first = tensor.const_data_ptr();
    EXPECT_EQ(tensor.const_data_ptr(), first);
  }
  // Not to one that it is too small for.
  EXPECT_NE(at::empty({1000 + 256}).const_data_ptr(), first);
}

// Two tensors in one block, or a block that is shorter than was asked for, would overwrite one
// another. Sizes on both sides of each limit.
TEST_F(HostAllocator, BlocksOfAnySizeAreAlignedAndApart) {
  for (int round = 0; round < 2; ++round) {
    std::vector<at::Tensor> tensors;
    for (int64_t limit = 32; limit <= int64_t{4} << 20; limit *= 2) {
      for (const int64_t step : {4, 5, 6, 7}) {
        for (const int64_t off : {-1, 0, 1}) {
          tensors.push_back(at::empty({limit * step / 4 + off}, at::kByte));
          const auto value = static_cast<int64_t>(tensors.size() % 251);
          tensors.back().fill_(value);
          EXPECT_EQ(reinterpret_cast<uintptr_t>(tensors.back().const_data_ptr()) % 64, 0u);
        }
      }
    }
    for (size_t i = 0; i < tensors.size(); ++i) {
      EXPECT_TRUE(tensors[i].eq(static_cast<int64_t>((i + 1) % 251)).all().item<bool>()) << i;
    }
  }
}

TEST_F(HostAllocator, NothingIsNoBlock) { EXPECT_EQ(at::empty({0}).const_data_ptr(), nullptr); }

// What was made before is freed the way it was made.
TEST(HostAllocatorSwitch, LeavesEarlierTensorsAlone) {
  c10::SetCPUAllocator(c10::GetDefaultCPUAllocator());
  at::Tensor early = at::arange(100);
  reuse_tensor_memory();
  early.resize_({200});
  early = at::Tensor();
  const at::Tensor late = at::arange(100);
  EXPECT_TRUE(at::equal(late, at::arange(100)));
}

// Under tsan: a data race.
TEST_F(HostAllocator, ThreadsMayFreeWhatOthersMade) {
  std::vector<at::Tensor> made(64);
  const auto fill = [&](size_t from) {
    for (size_t i = from; i < made.size(); i += 2)
      made[i] = at::ones({static_cast<int64_t>(i) + 1});
  };
  for (int round = 0; round < 20; ++round) {
    std::thread other(fill, round % 2);
    fill((round + 1) % 2);
    other.join();
    std::set<const void*> distinct;
    for (const at::Tensor& tensor : made) {
      distinct.insert(tensor.const_data_ptr());
      EXPECT_EQ(tensor.sum().item<int64_t>(), tensor.numel());
    }
    EXPECT_EQ(distinct.size(), made.size());
  }
}

}  // namespace
}  // namespace ppfsdp::comm
