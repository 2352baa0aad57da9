// What each operation of the Communicator makes of NCCL's functions: which, on which communicator
// and stream, with which memory, counts and reductions. Ranks that agree in a wrong call (a sum for
// an average, elements for bytes, another stream) would give wrong values only sometimes, or only
// on a GPU.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <c10/core/Stream.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backends/nccl/streams.h"
#include "backends/nccl/testing/thread_world.h"
#include "src/comm/call.h"

namespace ppfsdp::nccl::testing {
namespace {

using comm::ReduceOp;
using comm::StreamPriority;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

ThreadWorldOptions make_options() {
  ThreadWorldOptions options;
  options.settings.timeout = std::chrono::seconds(50);
  // The comparisons of calls are NCCL calls as well.
  options.settings.checked = 0;
  return options;
}

std::vector<std::string> texts_of(const std::vector<NcclCall>& calls) {
  std::vector<std::string> texts;
  for (const NcclCall& call : calls) texts.push_back(to_string(call));
  return texts;
}

/// One rank in a test, which sees what it calls.
struct Caller {
  NcclRuntime& runtime;
  FakeNccl& nccl;
  std::shared_ptr<comm::Stream> side;

  comm::Communicator& world() const { return *runtime.world(); }
  /// The calls that `fn` makes, or that its work makes until its stream is next used.
  std::vector<NcclCall> calls(const std::function<void()>& fn) const {
    const size_t before = nccl.calls(runtime.rank()).size();
    fn();
    side->synchronize();
    runtime.compute_stream().synchronize();
    const std::vector<NcclCall> all = nccl.calls(runtime.rank());
    return {all.begin() + static_cast<std::ptrdiff_t>(before), all.end()};
  }
  std::vector<std::string> texts(const std::function<void()>& fn) const {
    return texts_of(calls(fn));
  }
};

void run(int n, const std::function<void(Caller&)>& fn,
         const ThreadWorldOptions& options = make_options()) {
  ThreadWorld world(n, options);
  const auto errors = world.run([&](NcclRuntime& runtime) {
    Caller caller{runtime, world.nccl(), runtime.create_stream("side", StreamPriority::kHigh)};
    fn(caller);
  });
  EXPECT_THAT(errors, ::testing::Each(IsEmpty()));
  EXPECT_THAT(world.find_faults(), IsEmpty());
}

const FakeStream* native(comm::Stream& stream) {
  return static_cast<const FakeStream*>(as_nccl(stream)->stream().native_handle());
}

TEST(NcclCalls, AllGatherMovesBytesFromTheInputToTheOutput) {
  run(2, [](Caller& rank) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kBool, at::kComplexDouble}) {
      const at::Tensor input = at::ones({3}, dtype), output = at::empty({6}, dtype);
      const auto calls =
          rank.calls([&] { rank.world().all_gather_into(output, input, *rank.side); });
      ASSERT_THAT(texts_of(calls), ElementsAre(fmt::format("AllGather(comm 0, {} uint8)",
                                                           3 * c10::elementSize(dtype))));
      EXPECT_EQ(calls[0].send, input.data_ptr());
      EXPECT_EQ(calls[0].receive, output.data_ptr());
      EXPECT_EQ(calls[0].stream, native(*rank.side));
      EXPECT_EQ(calls[0].group, 0u);
    }
    // In place: NCCL sees by the addresses that it needs no copy.
    const at::Tensor output = at::ones({6});
    const at::Tensor slot = output.narrow(0, 3 * rank.runtime.rank(), 3);
    const auto calls = rank.calls([&] { rank.world().all_gather_into(output, slot, *rank.side); });
    EXPECT_EQ(calls.at(0).send, slot.data_ptr());
    EXPECT_EQ(calls.at(0).receive, output.data_ptr());
  });
}

TEST(NcclCalls, ReductionsAreNcclsOwn) {
  run(2, [](Caller& rank) {
    const auto scatter = [&](at::ScalarType dtype, const ReduceOp& op) {
      const at::Tensor input = at::ones({6}, dtype), output = at::empty({3}, dtype);
      const auto calls =
          rank.calls([&] { rank.world().reduce_scatter(output, input, op, *rank.side); });
      for (const NcclCall& call : calls) {
        if (call.function != "ReduceScatter") continue;
        EXPECT_EQ(call.send, input.data_ptr());
        EXPECT_EQ(call.receive, output.data_ptr());
        EXPECT_EQ(call.stream, native(*rank.side));
      }
      return texts_of(calls);
    };
    const auto reduce = [&](at::ScalarType dtype, const ReduceOp& op) {
      const at::Tensor tensor = at::ones({5}, dtype);
      const auto calls = rank.calls([&] { rank.world().all_reduce(tensor, op, *rank.side); });
      for (const NcclCall& call : calls) {
        if (call.function != "AllReduce") continue;
        EXPECT_EQ(call.send, tensor.data_ptr());
        EXPECT_EQ(call.receive, tensor.data_ptr());
      }
      return texts_of(calls);
    };
    EXPECT_THAT(scatter(at::kFloat, ReduceOp::sum()),
                ElementsAre("ReduceScatter(comm 0, 3 float32, sum)"));
    EXPECT_THAT(scatter(at::kBFloat16, ReduceOp::avg()),
                ElementsAre("ReduceScatter(comm 0, 3 bfloat16, avg)"));
    EXPECT_THAT(scatter(at::kHalf, ReduceOp::max()),
                ElementsAre("ReduceScatter(comm 0, 3 float16, max)"));
    EXPECT_THAT(scatter(at::kDouble, ReduceOp::min()),
                ElementsAre("ReduceScatter(comm 0, 3 float64, min)"));
    EXPECT_THAT(scatter(at::kLong, ReduceOp::sum()),
                ElementsAre("ReduceScatter(comm 0, 3 int64, sum)"));
    EXPECT_THAT(reduce(at::kInt, ReduceOp::max()), ElementsAre("AllReduce(comm 0, 5 int32, max)"));
    EXPECT_THAT(reduce(at::kChar, ReduceOp::sum()), ElementsAre("AllReduce(comm 0, 5 int8, sum)"));
    EXPECT_THAT(reduce(at::kByte, ReduceOp::min()), ElementsAre("AllReduce(comm 0, 5 uint8, min)"));
    EXPECT_THAT(reduce(at::kFloat, ReduceOp::avg()),
                ElementsAre("AllReduce(comm 0, 5 float32, avg)"));
    // The factor goes in the tensor's dtype: 0.3 is 0.30078125 in bf16.
    EXPECT_THAT(
        reduce(at::kBFloat16, ReduceOp::premul_sum(0.3)),
        ElementsAre("RedOpCreatePreMulSum(comm 0, premul(0.30078125) bfloat16)",
                    "AllReduce(comm 0, 5 bfloat16, premul(0.30078125))", "RedOpDestroy(comm 0)"));
    EXPECT_THAT(
        scatter(at::kDouble, ReduceOp::premul_sum(0.3)),
        ElementsAre("RedOpCreatePreMulSum(comm 0, premul(0.3) float64)",
                    "ReduceScatter(comm 0, 3 float64, premul(0.3))", "RedOpDestroy(comm 0)"));
    EXPECT_THAT(
        scatter(at::kFloat, ReduceOp::premul_sum(0.25)),
        ElementsAre("RedOpCreatePreMulSum(comm 0, premul(0.25) float32)",
                    "ReduceScatter(comm 0, 3 float32, premul(0.25))", "RedOpDestroy(comm 0)"));
  });
}

TEST(NcclCalls, ShortGoesAsInt) {
  run(2, [](Caller& rank) {
    const at::Tensor tensor = at::full({5}, 20000, at::kShort);
    EXPECT_THAT(rank.texts([&] { rank.world().all_reduce(tensor, ReduceOp::sum(), *rank.side); }),
                ElementsAre("AllReduce(comm 0, 5 int32, sum)"));
    EXPECT_EQ(tensor[4].item<int>(), static_cast<int16_t>(40000));
  });
}

TEST(NcclCalls, BroadcastIsInPlace) {
  run(3, [](Caller& rank) {
    const at::Tensor tensor = at::ones({3}, at::kBFloat16);
    const auto calls = rank.calls([&] { rank.world().broadcast(tensor, 2, *rank.side); });
    ASSERT_THAT(texts_of(calls), ElementsAre("Broadcast(comm 0, 6 uint8, rank 2)"));
    EXPECT_EQ(calls[0].send, tensor.data_ptr());
    EXPECT_EQ(calls[0].receive, tensor.data_ptr());
  });
}

// One group of all parts: sends before receives, one by one, would wait for each other.
TEST(NcclCalls, AllToAllIsOneGroupOfItsPartsWithoutTheEmptyOnes) {
  run(3, [](Caller& rank) {
    const int me = rank.runtime.rank();
    // Rank a sends b (a + b) % 3 elements.
    std::vector<int64_t> splits;
    int64_t total = 0;
    for (int peer = 0; peer < 3; ++peer) total += splits.emplace_back((me + peer) % 3);
    const at::Tensor input = at::ones({total}), output = at::empty({total});
    const auto calls =
        rank.calls([&] { rank.world().all_to_all(output, input, splits, splits, *rank.side); });
    std::vector<std::string> expected;
    size_t i = 0;
    int64_t offset = 0;
    for (int peer = 0; peer < 3; ++peer) {
      if (splits[peer] == 0) continue;
      for (const char* function : {"Send", "Recv"}) {
        ASSERT_LT(i, calls.size());
        expected.push_back(
            fmt::format("{}(comm 0, {} uint8, rank {})", function, 4 * splits[peer], peer));
        EXPECT_EQ(calls[i].group, calls[0].group);
        const void* data = function[0] == 'S' ? calls[i].send : calls[i].receive;
        const at::Tensor& side = function[0] == 'S' ? input : output;
        EXPECT_EQ(data, side.const_data_ptr<float>() + offset);
        ++i;
      }
      offset += splits[peer];
    }
    EXPECT_EQ(texts_of(calls), expected);
    EXPECT_NE(calls.at(0).group, 0u);
  });
}

TEST(NcclCalls, MessagesOfSideStreamsAreOneGroup) {
  run(2, [](Caller& rank) {
    const int peer = 1 - rank.runtime.rank();
    const at::Tensor out = at::ones({2}), in = at::empty({2});
    const auto calls = rank.calls([&] {
      rank.world().send(out, peer, *rank.side);
      rank.world().recv(in, peer, *rank.side);
    });
    ASSERT_THAT(texts_of(calls), ElementsAre(fmt::format("Send(comm 0, 8 uint8, rank {})", peer),
                                             fmt::format("Recv(comm 0, 8 uint8, rank {})", peer)));
    EXPECT_NE(calls[0].group, 0u);
    EXPECT_EQ(calls[0].group, calls[1].group);
    EXPECT_EQ(calls[0].send, out.data_ptr());
    EXPECT_EQ(calls[1].receive, in.data_ptr());
  });
}

TEST(NcclCalls, NothingIsSentForNothing) {
  run(2, [](Caller& rank) {
    const at::Tensor none = at::empty({0});
    EXPECT_THAT(rank.texts([&] {
      rank.world().all_gather_into(none, none, *rank.side);
      rank.world().reduce_scatter(none, none, ReduceOp::avg(), *rank.side);
      rank.world().all_reduce(none, ReduceOp::premul_sum(0.5), *rank.side);
      rank.world().broadcast(none, 0, *rank.side);
      rank.world().all_to_all(none, none, {}, {}, *rank.side);
    }),
                IsEmpty());
  });
}

TEST(NcclCalls, GroupsAreSplitByTheirFirstMemberInTheirOrder) {
  run(4, [](Caller& rank) {
    const int me = rank.runtime.rank();
    comm::CommunicatorPtr half;
    const auto calls = rank.calls([&] {
      half = rank.world().subgroup(me % 2 == 0 ? std::vector<int>{0, 2} : std::vector<int>{1, 3},
                                   "half");
    });
    std::vector<NcclCall> splits;
    for (const NcclCall& call : calls) {
      if (call.function == "CommSplit") splits.push_back(call);
    }
    ASSERT_EQ(splits.size(), 1u);
    EXPECT_EQ(splits[0].comm, 0);
    EXPECT_EQ(splits[0].peer, me % 2) << "the color";
    EXPECT_EQ(splits[0].count, static_cast<size_t>(me)) << "the key";
    EXPECT_THAT(splits[0].detail, ::testing::HasSubstr("blocking=0"));
    EXPECT_THAT(splits[0].detail, ::testing::HasSubstr("commName=half"));
    const at::Tensor tensor = at::ones({2});
    EXPECT_THAT(rank.texts([&] { half->all_reduce(tensor, ReduceOp::sum(), *rank.side); }),
                ElementsAre("AllReduce(comm 1, 2 float32, sum)"));
  });
}

TEST(NcclCalls, TheWorldIsMadeWithoutBlocking) {
  ThreadWorld world(3, make_options());
  world.run([](NcclRuntime&) {});
  for (int rank = 0; rank < 3; ++rank) {
    const auto calls = world.nccl().calls(rank);
    const size_t first = rank == 0 ? 1 : 0;
    EXPECT_EQ(
        to_string(calls.at(first)),
        fmt::format("CommInitRankConfig(comm 0, 3, rank {}, blocking=0 commName=world)", rank));
    if (rank == 0) {
      EXPECT_EQ(calls[0].function, "GetUniqueId");
    }
    EXPECT_EQ(to_string(calls.at(calls.size() - 2)), "CommFinalize(comm 0)");
    EXPECT_EQ(to_string(calls.back()), "CommDestroy(comm 0)");
  }
}

TEST(NcclCalls, GroupsEndBeforeTheGroupsTheyAreOf) {
  ThreadWorld world(2, make_options());
  world.run([](NcclRuntime& runtime) {
    const auto pair = runtime.world()->subgroup({0, 1}, "pair");
    pair->subgroup({runtime.rank()}, "self");
  });
  std::vector<std::string> ends;
  for (const NcclCall& call : world.nccl().calls(1)) {
    if (call.function == "CommDestroy" || call.function == "CommFinalize") {
      ends.push_back(to_string(call));
    }
  }
  EXPECT_THAT(ends,
              ElementsAre("CommFinalize(comm 2)", "CommFinalize(comm 1)", "CommFinalize(comm 0)",
                          "CommDestroy(comm 2)", "CommDestroy(comm 1)", "CommDestroy(comm 0)"));
  EXPECT_THAT(world.find_faults(), IsEmpty());
}

TEST(NcclCalls, AllocatedMemoryIsRegisteredAndUsedAgain) {
  run(2, [](Caller& rank) {
    const void* data = nullptr;
    const auto allocate = [&] {
      const at::Tensor output = rank.world().allocate(1000, at::kFloat, *rank.side);
      EXPECT_EQ(output.numel(), 1000);
      EXPECT_EQ(output.scalar_type(), at::kFloat);
      data = output.const_data_ptr();
      rank.world().all_gather_into(output, at::ones({500}), *rank.side);
    };
    const auto calls = rank.calls(allocate);
    ASSERT_EQ(calls.size(), 3u) << ::testing::PrintToString(texts_of(calls));
    EXPECT_EQ(calls[0].function, "MemAlloc");
    EXPECT_GE(calls[0].count, 4000u);
    EXPECT_EQ(calls[1].function, "CommRegister");
    EXPECT_EQ(calls[1].count, calls[0].count);
    EXPECT_EQ(calls[2].receive, data);
    const void* first = data;
    EXPECT_THAT(rank.texts(allocate), ElementsAre("AllGather(comm 0, 2000 uint8)"))
        << "memory is asked for again each time";
    EXPECT_EQ(data, first);
  });
}

// Deregistered before it is freed, and before the communicator ends: find_faults looks for that.
TEST(NcclCalls, AllocatedMemoryMayOutliveTheRuntime) {
  std::vector<at::Tensor> kept(2);
  ThreadWorld world(2, make_options());
  world.run([&](NcclRuntime& runtime) {
    kept[runtime.rank()] = runtime.world()->allocate(1000, at::kFloat, runtime.compute_stream());
    kept[runtime.rank()].fill_(runtime.rank());
  });
  EXPECT_EQ(world.nccl().living(), (FakeNccl::Living{0, 2, 0, 0}));
  EXPECT_EQ(kept[1][999].item<float>(), 1.0f);
  kept.clear();
  EXPECT_THAT(world.find_faults(), IsEmpty());
}

TEST(NcclCalls, WithoutSuchMemoryTheStreamsIsTaken) {
  ThreadWorld world(2, make_options());
  world.nccl().inject([](const NcclCall& call) { return call.function == "MemAlloc"; },
                      {NcclFault::Kind::kFails, ncclUnhandledCudaError, "no such memory"});
  const auto errors = world.run([&](NcclRuntime& runtime) {
    const auto side = runtime.create_stream("side", StreamPriority::kNormal);
    for (int i = 0; i < 3; ++i) {
      const at::Tensor tensor = runtime.world()->allocate(1000, at::kFloat, *side);
      EXPECT_EQ(tensor.numel(), 1000);
    }
  });
  EXPECT_THAT(errors, ::testing::Each(IsEmpty()));
  int asked = 0;
  for (const NcclCall& call : world.nccl().calls(0)) asked += call.function == "MemAlloc" ? 1 : 0;
  EXPECT_EQ(asked, 1) << "it is asked for again though there is none";
  EXPECT_THAT(world.find_faults(), IsEmpty());
}

// Memory is idle once the host has dropped its tensor, while its stream may still write there:
// find_faults looks for that.
TEST(NcclCalls, MemoryIsFreedForOtherMemoryOnlyOnceItsStreamIsDone) {
  ThreadWorldOptions options = make_options();
  options.devices.late = true;
  ThreadWorld world(2, options);
  world.nccl().inject(
      [](const NcclCall& call) { return call.function == "MemAlloc" && call.count > 8192; },
      {NcclFault::Kind::kFails, ncclUnhandledCudaError, "out of memory"});
  const auto errors = world.run([&](NcclRuntime& runtime) {
    comm::Communicator& group = *runtime.world();
    comm::Stream& stream = runtime.compute_stream();
    const at::Tensor input = at::ones({500});
    group.all_gather_into(group.allocate(1000, at::kFloat, stream), input, stream);
    EXPECT_EQ(group.allocate(10000, at::kFloat, stream).numel(), 10000);
    int freed = 0;
    for (const NcclCall& call : world.nccl().calls(runtime.rank())) {
      freed += call.function == "MemFree" ? 1 : 0;
    }
    EXPECT_EQ(freed, 1) << "what is idle is not given up for what is needed";
  });
  EXPECT_THAT(errors, ::testing::Each(IsEmpty()));
  EXPECT_THAT(world.find_faults(), IsEmpty());
}

// The first `checked` operations and every 64th after them are compared by one gather of the calls,
// on the operation's own communicator and stream; no other pays for it.
TEST(NcclCalls, AComparisonIsOneGatherBeforeTheOperation) {
  ThreadWorldOptions options = make_options();
  options.settings.checked = 2;
  run(
      2,
      [](Caller& rank) {
        const at::Tensor tensor = at::ones({5});
        const std::string gather =
            fmt::format("AllGather(comm 0, {} int64)", comm::encoded_size(0));
        const std::string reduce = "AllReduce(comm 0, 5 float32, max)";
        for (int i = 0; i < 130; ++i) {
          const auto calls =
              rank.calls([&] { rank.world().all_reduce(tensor, ReduceOp::max(), *rank.side); });
          if (i < 2 || i % 64 == 0) {
            ASSERT_THAT(texts_of(calls), ElementsAre(gather, reduce)) << "operation " << i;
            EXPECT_EQ(calls[0].stream, native(*rank.side));
          } else {
            ASSERT_THAT(texts_of(calls), ElementsAre(reduce)) << "operation " << i;
          }
        }
      },
      options);
}

// The priority is what lets a gather overtake the compute stream's kernels.
TEST(NcclCalls, StreamsHaveTheirPriorities) {
  run(1, [](Caller& rank) {
    EXPECT_LT(native(*rank.side)->priority(), 0);
    EXPECT_EQ(native(*rank.runtime.create_stream("normal", StreamPriority::kNormal))->priority(),
              0);
  });
}

// Work is on its stream only when nothing is in progress any more: an event that is recorded before
// would let others read too early.
TEST(NcclCalls, WhatIsInProgressForLongIsWaitedForBeforeAnythingElse) {
  ThreadWorldOptions options = make_options();
  options.polls = 50;
  options.devices.late = true;
  run(
      2,
      [](Caller& rank) {
        const auto group = rank.world().subgroup({0, 1}, "pair");
        const at::Tensor tensor = at::full({3}, 1.0 + rank.runtime.rank());
        group->all_reduce(tensor, ReduceOp::premul_sum(0.5), *rank.side);
        rank.runtime.compute_stream().wait(rank.side->record());
        EXPECT_EQ(tensor[2].item<float>(), 1.5f);
      },
      options);
}

}  // namespace
}  // namespace ppfsdp::nccl::testing
