// That the fake does what NCCL does, as far as the backend's tests rest on it.
#include "backends/nccl/fake/fake_nccl.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/BFloat16.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "src/comm/reduction.h"
#include "src/comm/testing/values.h"

namespace ppfsdp::nccl::testing {
namespace {

using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

/// One rank's side of a test.
struct Rank {
  FakeDevices& devices;
  int rank;
  ncclComm_t comm = nullptr;
  FakeStream* stream = nullptr;

  cudaStream_t handle() const { return reinterpret_cast<cudaStream_t>(stream); }
  void finish() const {
    auto held = devices.lock();
    devices.wait(held, stream->end());
  }
  bool done() const { return stream->end().reached(); }
  ncclResult_t error() const {
    ncclResult_t error = ncclInternalError;
    EXPECT_EQ(ncclCommGetAsyncError(comm, &error), ncclSuccess);
    return error;
  }
  /// Waits until nothing is in progress.
  ncclResult_t settle() const {
    ncclResult_t now = ncclInProgress;
    while ((now = error()) == ncclInProgress) std::this_thread::yield();
    return now;
  }
};

class FakeNcclTest : public ::testing::Test {
 protected:
  void run(int n, bool blocking, const std::function<void(Rank&)>& fn) {
    ncclUniqueId id;
    ASSERT_EQ(ncclGetUniqueId(&id), ncclSuccess);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < n; ++rank) {
      threads.emplace_back([&, rank] {
        c10::impl::VirtualGuardImpl(kType).setDevice(
            c10::Device(kType, static_cast<c10::DeviceIndex>(rank)));
        Rank mine{devices_, rank, nullptr, &devices_.new_stream(rank, 0)};
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.blocking = blocking ? 1 : 0;
        const ncclResult_t result = ncclCommInitRankConfig(&mine.comm, n, id, rank, &config);
        EXPECT_EQ(result, blocking ? ncclSuccess : ncclInProgress);
        EXPECT_EQ(mine.settle(), ncclSuccess);
        fn(mine);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  FakeDevices devices_;
  FakeNccl nccl_{devices_};
};

TEST_F(FakeNcclTest, ReducesAsNcclDoes) {
  run(3, true, [&](Rank& mine) {
    const auto inputs = comm::testing::make_all_values(at::kBFloat16, 12, 1, 3);
    const at::Tensor input = inputs[mine.rank].clone(), output = at::empty({4}, at::kBFloat16);
    EXPECT_EQ(ncclReduceScatter(input.data_ptr(), output.data_ptr(), 4, ncclBfloat16, ncclAvg,
                                mine.comm, mine.handle()),
              ncclSuccess);
    mine.finish();
    // Rank q's part: ((x[q + 1] / 3 + x[q + 2] / 3) + x[q] / 3), each step rounded, 1 / 3 as well.
    const c10::BFloat16 third(1.0f / 3.0f);
    const auto part = [&](int rank) {
      return inputs[rank % 3].narrow(0, mine.rank * 4, 4).mul(static_cast<float>(third));
    };
    const at::Tensor expected = part(mine.rank + 1).add(part(mine.rank + 2)).add(part(mine.rank));
    EXPECT_EQ(comm::testing::difference_in_bits(output, expected), "");
    c10::BFloat16 factor(0.3f);
    ncclRedOp_t op;
    EXPECT_EQ(
        ncclRedOpCreatePreMulSum(&op, &factor, ncclBfloat16, ncclScalarHostImmediate, mine.comm),
        ncclSuccess);
    EXPECT_EQ(ncclAllReduce(input.data_ptr(), input.data_ptr(), 12, ncclBfloat16, op, mine.comm,
                            mine.handle()),
              ncclSuccess);
    EXPECT_EQ(ncclRedOpDestroy(op, mine.comm), ncclSuccess);
    mine.finish();
    at::Tensor sum = at::empty({12}, at::kBFloat16);
    comm::reduce_range(comm::ReductionOrder::kNcclRing, comm::ReduceOp::premul_sum(0.3), inputs, 0,
                       12, sum);
    EXPECT_EQ(comm::testing::difference_in_bits(input, sum), "");
    EXPECT_EQ(ncclCommDestroy(mine.comm), ncclSuccess);
  });
  EXPECT_THAT(nccl_.misuses(), IsEmpty());
  EXPECT_EQ(nccl_.living(), FakeNccl::Living());
}

TEST_F(FakeNcclTest, GathersAndBroadcastsInPlaceAndNot) {
  run(3, true, [&](Rank& mine) {
    const at::Tensor output = at::full({6}, -1, at::kInt), in_place = at::full({6}, -1, at::kInt);
    const at::Tensor input = at::full({2}, mine.rank, at::kInt);
    in_place.narrow(0, 2 * mine.rank, 2).fill_(mine.rank);
    auto* slot = in_place.mutable_data_ptr<int>() + 2 * mine.rank;
    ncclAllGather(input.data_ptr(), output.data_ptr(), 2, ncclInt32, mine.comm, mine.handle());
    ncclAllGather(slot, in_place.data_ptr(), 2, ncclInt32, mine.comm, mine.handle());
    ncclBroadcast(input.data_ptr(), input.data_ptr(), 2, ncclInt32, 2, mine.comm, mine.handle());
    mine.finish();
    const at::Tensor expected = at::cat(
        {at::full({2}, 0, at::kInt), at::full({2}, 1, at::kInt), at::full({2}, 2, at::kInt)});
    EXPECT_TRUE(output.equal(expected));
    EXPECT_TRUE(in_place.equal(expected));
    EXPECT_TRUE(input.equal(at::full({2}, 2, at::kInt)));
    ncclCommDestroy(mine.comm);
  });
  EXPECT_THAT(nccl_.misuses(), IsEmpty());
}

TEST_F(FakeNcclTest, AMessageWaitsForItsOtherEnd) {
  std::atomic<bool> go{false};
  run(2, true, [&](Rank& mine) {
    float value = mine.rank == 0 ? 7.0f : 0.0f;
    if (mine.rank == 0) {
      ncclSend(&value, 1, ncclFloat32, 1, mine.comm, mine.handle());
      EXPECT_FALSE(mine.done()) << "sent before anybody received";
      go = true;
    } else {
      while (!go) std::this_thread::yield();
      ncclRecv(&value, 1, ncclFloat32, 0, mine.comm, mine.handle());
    }
    mine.finish();
    EXPECT_EQ(value, 7.0f);
    // Both ways at once only in a group.
    float out = mine.rank + 1.0f, in = 0;
    ncclGroupStart();
    ncclSend(&out, 1, ncclFloat32, 1 - mine.rank, mine.comm, mine.handle());
    ncclRecv(&in, 1, ncclFloat32, 1 - mine.rank, mine.comm, mine.handle());
    EXPECT_EQ(ncclGroupEnd(), ncclSuccess);
    mine.finish();
    EXPECT_EQ(in, 2.0f - mine.rank);
    ncclSend(&out, 1, ncclFloat32, 1 - mine.rank, mine.comm, mine.handle());
    EXPECT_FALSE(mine.done()) << "two sends met without a receive";
    ncclCommAbort(mine.comm);
    mine.finish();
  });
}

// As NCCL joins the streams of a group: each waits for all of it.
TEST_F(FakeNcclTest, AGroupOfTwoStreamsHoldsBothUntilItIsDone) {
  std::atomic<bool> go{false};
  run(2, true, [&](Rank& mine) {
    FakeStream& other = devices_.new_stream(mine.rank, 0);
    float out = mine.rank + 1.0f, in = 0;
    if (mine.rank == 0) {
      while (!go) std::this_thread::yield();
    }
    ncclGroupStart();
    ncclSend(&out, 1, ncclFloat32, 1 - mine.rank, mine.comm, mine.handle());
    ncclRecv(&in, 1, ncclFloat32, 1 - mine.rank, mine.comm, reinterpret_cast<cudaStream_t>(&other));
    EXPECT_EQ(ncclGroupEnd(), ncclSuccess);
    if (mine.rank == 1) {
      EXPECT_FALSE(mine.done());
      EXPECT_FALSE(other.end().reached());
      go = true;
    }
    auto held = devices_.lock();
    devices_.wait(held, other.end());
    EXPECT_EQ(in, 2.0f - mine.rank);
  });
}

TEST_F(FakeNcclTest, OperationsOfOneCommunicatorGoInOrderOnAllStreams) {
  run(2, true, [&](Rank& mine) {
    FakeStream& other = devices_.new_stream(mine.rank, 0);
    float a = 1, b = 1;
    // Rank 1 lacks the first operation: the second must not start.
    if (mine.rank == 0) ncclAllReduce(&a, &a, 1, ncclFloat32, ncclSum, mine.comm, mine.handle());
    ncclAllReduce(&b, &b, 1, ncclFloat32, ncclSum, mine.comm,
                  reinterpret_cast<cudaStream_t>(&other));
    if (mine.rank == 0) {
      mine.finish();
      EXPECT_EQ(a, 2.0f) << "paired with the other rank's first";
      EXPECT_FALSE(other.end().reached());
    }
    if (mine.rank == 1) {
      auto held = devices_.lock();
      devices_.wait(held, other.end());
    }
    ncclCommAbort(mine.comm);
    auto held = devices_.lock();
    devices_.wait(held, other.end());
  });
  EXPECT_THAT(nccl_.misuses(), IsEmpty());
}

TEST_F(FakeNcclTest, WhatDoesNotMatchIsNeverDoneUntilAborted) {
  std::atomic<int> issued{0};
  run(2, true, [&](Rank& mine) {
    float values[3] = {1, 1, 1};
    const size_t count = mine.rank == 0 ? 2 : 3;
    EXPECT_EQ(ncclAllReduce(values, values, count, ncclFloat32, ncclSum, mine.comm, mine.handle()),
              ncclSuccess);
    ++issued;
    while (issued < 2) std::this_thread::yield();
    EXPECT_EQ(mine.error(), ncclSuccess) << "NCCL would not notice";
    EXPECT_FALSE(mine.done());
    EXPECT_EQ(ncclCommAbort(mine.comm), ncclSuccess);
    mine.finish();
    EXPECT_EQ(values[0], 1.0f);
  });
}

TEST_F(FakeNcclTest, ASplitIsThereWhenTheParentIsReady) {
  run(4, false, [&](Rank& mine) {
    ncclComm_t child = nullptr;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    // Reversed: key orders the ranks of the new communicator.
    EXPECT_EQ(ncclCommSplit(mine.comm, mine.rank % 2, -mine.rank, &child, &config), ncclInProgress);
    EXPECT_EQ(child, nullptr);
    EXPECT_EQ(mine.settle(), ncclSuccess);
    ASSERT_NE(child, nullptr);
    Rank half = mine;
    half.comm = child;
    EXPECT_EQ(half.settle(), ncclSuccess);
    int rank = -1, size = 0;
    ncclCommUserRank(child, &rank);
    ncclCommCount(child, &size);
    EXPECT_EQ(size, 2);
    EXPECT_EQ(rank, mine.rank < 2 ? 1 : 0);
    int sum = mine.rank;
    EXPECT_EQ(ncclAllReduce(&sum, &sum, 1, ncclInt32, ncclSum, child, mine.handle()),
              ncclInProgress);
    EXPECT_TRUE(mine.done()) << "the work is on the stream only when it is no longer in progress";
    EXPECT_EQ(half.settle(), ncclSuccess);
    mine.finish();
    EXPECT_EQ(sum, mine.rank % 2 == 0 ? 2 : 4);
    for (const ncclComm_t comm : {child, mine.comm}) {
      Rank closing = mine;
      closing.comm = comm;
      EXPECT_EQ(ncclCommFinalize(comm), ncclInProgress);
      EXPECT_EQ(closing.settle(), ncclSuccess);
      EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
    }
  });
  EXPECT_THAT(nccl_.misuses(), IsEmpty());
  EXPECT_EQ(nccl_.living(), FakeNccl::Living());
  std::vector<std::string> texts;
  for (const NcclCall& call : nccl_.calls(1)) texts.push_back(to_string(call));
  EXPECT_THAT(texts, Contains("AllReduce(comm 1, 1 int32, sum)"));
  EXPECT_THAT(texts, Contains("CommInitRankConfig(comm 0, 4, rank 1, blocking=0)"));
}

TEST_F(FakeNcclTest, FaultsComeWhereTheyAreInjected) {
  nccl_.inject([](const NcclCall& call) { return call.rank == 1 && call.nth == 1; },
               {NcclFault::Kind::kFailsLater, ncclRemoteError, "the cable is out"});
  nccl_.inject([](const NcclCall& call) { return call.rank == 0 && call.nth == 2; },
               {NcclFault::Kind::kFails, ncclSystemError, "no more handles"});
  nccl_.inject([](const NcclCall& call) { return call.function == "MemAlloc"; },
               {NcclFault::Kind::kFails, ncclInvalidUsage, "not here"});
  run(2, true, [&](Rank& mine) {
    float value = 1;
    const auto reduce = [&] {
      return ncclAllReduce(&value, &value, 1, ncclFloat32, ncclSum, mine.comm, mine.handle());
    };
    EXPECT_EQ(reduce(), ncclSuccess);
    mine.finish();
    EXPECT_EQ(value, 2.0f);
    EXPECT_EQ(reduce(), ncclSuccess);
    if (mine.rank == 1) {
      EXPECT_EQ(mine.error(), ncclRemoteError);
      EXPECT_STREQ(ncclGetLastError(mine.comm), "the cable is out");
      EXPECT_EQ(reduce(), ncclRemoteError);
    } else {
      EXPECT_EQ(mine.error(), ncclSuccess);
      EXPECT_EQ(reduce(), ncclSystemError);
      EXPECT_STREQ(ncclGetLastError(mine.comm), "no more handles");
    }
    EXPECT_FALSE(mine.done());
    void* memory = nullptr;
    EXPECT_EQ(ncclMemAlloc(&memory, 8), ncclInvalidUsage);
    ncclCommAbort(mine.comm);
    mine.finish();
  });
  EXPECT_THAT(nccl_.misuses(), IsEmpty());
}

TEST_F(FakeNcclTest, InitThatNeverReturnsDoesUntilAborted) {
  nccl_.inject([](const NcclCall& call) { return call.rank == 0; },
               {NcclFault::Kind::kBlocks, ncclSuccess});
  ncclUniqueId id;
  ncclGetUniqueId(&id);
  std::atomic<ncclComm_t> stuck{nullptr};
  std::atomic<bool> returned{false};
  std::thread first([&] {
    c10::impl::VirtualGuardImpl(kType).setDevice(c10::Device(kType, 0));
    ncclComm_t comm = nullptr;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    EXPECT_EQ(ncclCommInitRankConfig(&comm, 2, id, 0, &config), ncclInternalError);
    returned = true;
  });
  std::thread second([&] {
    c10::impl::VirtualGuardImpl(kType).setDevice(c10::Device(kType, 1));
    ncclComm_t comm = nullptr;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    EXPECT_EQ(ncclCommInitRankConfig(&comm, 2, id, 1, &config), ncclInProgress);
    ncclResult_t error;
    for (int i = 0; i < 100; ++i) {
      ncclCommGetAsyncError(comm, &error);
      EXPECT_EQ(error, ncclInProgress);
    }
    ncclCommAbort(comm);
  });
  second.join();
  EXPECT_FALSE(returned);
  nccl_.release();
  first.join();
}

TEST_F(FakeNcclTest, MisusesAreNoted) {
  nccl_.inject([](const NcclCall& call) { return call.function == "AllReduce" && call.nth == 1; },
               {NcclFault::Kind::kNeverDone});
  run(1, false, [&](Rank& mine) {
    float value = 1;
    const auto reduce = [&] {
      return ncclAllReduce(&value, &value, 1, ncclFloat32, ncclSum, mine.comm, mine.handle());
    };
    EXPECT_EQ(reduce(), ncclInProgress);
    EXPECT_EQ(reduce(), ncclInvalidArgument);
    mine.settle();
    EXPECT_EQ(reduce(), ncclInProgress);
    mine.settle();
    void *memory = nullptr, *handle = nullptr;
    EXPECT_EQ(ncclMemAlloc(&memory, 64), ncclSuccess);
    EXPECT_EQ(ncclCommRegister(mine.comm, memory, 64, &handle), ncclSuccess);
    EXPECT_EQ(nccl_.living(), (FakeNccl::Living{1, 1, 1, 0}));
    ncclMemFree(memory);
    ncclCommDestroy(mine.comm);
    ncclCommDeregister(mine.comm, handle);
    EXPECT_EQ(reduce(), ncclInvalidArgument);
    ncclCommAbort(mine.comm);
  });
  EXPECT_THAT(
      nccl_.misuses(),
      ElementsAre(HasSubstr("for which something is in progress"),
                  HasSubstr("memory that is registered"),
                  HasSubstr("destroyed while its operations are under way"),
                  HasSubstr("destroyed while memory is registered"),
                  HasSubstr("CommDeregister on what is no communicator"),
                  HasSubstr("which is destroyed"), HasSubstr("no communicator (any more)")));
}

TEST_F(FakeNcclTest, AStoppedRankIsMissedByTheOthers) {
  std::atomic<bool> checked{false};
  run(2, true, [&](Rank& mine) {
    float value = 1;
    if (mine.rank == 1) nccl_.stop_rank(1);
    ncclAllReduce(&value, &value, 1, ncclFloat32, ncclSum, mine.comm, mine.handle());
    if (mine.rank == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      EXPECT_FALSE(mine.done());
      checked = true;
    }
    while (!checked) std::this_thread::yield();
    ncclCommAbort(mine.comm);
    mine.finish();
    EXPECT_EQ(value, 1.0f);
  });
}

}  // namespace
}  // namespace ppfsdp::nccl::testing
