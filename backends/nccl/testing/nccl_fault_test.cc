// What goes wrong in NCCL, on a rank or in the store: every rank must end with one error that says
// what it was doing, within the timeout, with nothing left over; none may hang. A hang ends this
// process (ThreadWorld::run).
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "backends/nccl/testing/thread_world.h"
#include "src/comm/communicator.h"

namespace ppfsdp::nccl::testing {
namespace {

using comm::ReduceOp;
using comm::StreamPriority;
using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// Far beyond what any of these take: errors by timeout have a text of their own.
constexpr milliseconds kLong{30000};
constexpr milliseconds kShort{400};

ThreadWorldOptions make_options(milliseconds timeout) {
  ThreadWorldOptions options;
  options.settings.timeout = timeout;
  options.settings.checked = 0;
  options.settings.poll = milliseconds(5);
  options.settings.report = milliseconds(10);
  options.settings.silence = milliseconds(30000);
  return options;
}

FakeNccl::Where nth_call(int rank, const std::string& function, uint64_t nth) {
  return [=](const NcclCall& call) {
    return call.rank == rank && call.function == function && call.nth == nth;
  };
}

void reduce_once(NcclRuntime& runtime, comm::Stream& stream) {
  runtime.world()->all_reduce(at::full({7}, 1.0), ReduceOp::sum(), stream, "layers.3");
}

/// Ten reductions on a side stream, each waited for.
void reduce_ten_times(NcclRuntime& runtime) {
  const auto stream = runtime.create_stream("side", StreamPriority::kNormal);
  for (int i = 0; i < 10; ++i) {
    reduce_once(runtime, *stream);
    stream->synchronize();
  }
}

std::vector<std::string> run(ThreadWorld& world, const std::function<void(NcclRuntime&)>& fn) {
  const auto errors = world.run(fn);
  EXPECT_THAT(world.find_faults(), IsEmpty());
  return errors;
}

// ---- Init.
// ---------------------------------------------------------------------------------------

TEST(NcclFault, InitThatStaysInProgressIsATimeoutOnEveryRank) {
  ThreadWorld world(3, make_options(kShort));
  world.nccl().inject(nth_call(1, "CommInitRankConfig", 0), {NcclFault::Kind::kNeverDone});
  EXPECT_THAT(run(world, [](NcclRuntime&) { FAIL() << "the world was made"; }),
              Each(AnyOf(AllOf(HasSubstr("starting NCCL for the world of 3 ranks"),
                               HasSubstr("within 0.4 s"), HasSubstr("all ranks had come")),
                         HasSubstr(" failed: starting NCCL for the world of 3 ranks"))));
}

TEST(NcclFault, InitThatDoesNotReturnIsATimeoutOnEveryRank) {
  ThreadWorld world(3, make_options(kShort));
  world.nccl().inject(nth_call(1, "CommInitRankConfig", 0), {NcclFault::Kind::kBlocks});
  EXPECT_THAT(run(world, [](NcclRuntime&) { FAIL() << "the world was made"; }),
              Each(AnyOf(AllOf(HasSubstr("starting NCCL for the world of 3 ranks"),
                               HasSubstr("within 0.4 s")),
                         HasSubstr(" failed: starting NCCL for the world of 3 ranks"))));
}

TEST(NcclFault, InitThatFailsSaysWhatNcclSays) {
  for (const auto kind : {NcclFault::Kind::kFails, NcclFault::Kind::kFailsLater}) {
    ThreadWorld world(3, make_options(kLong));
    world.nccl().inject(nth_call(1, "CommInitRankConfig", 0),
                        {kind, ncclSystemError, "no socket interface found"});
    const auto errors = run(world, [](NcclRuntime&) { FAIL() << "the world was made"; });
    EXPECT_THAT(errors, Each(HasSubstr("starting NCCL for the world of 3 ranks")));
    EXPECT_THAT(errors[1],
                AllOf(HasSubstr("unhandled system error"), HasSubstr("no socket interface found"),
                      HasSubstr("this is rank 1")));
    EXPECT_THAT(errors[0], HasSubstr("rank 1 failed")) << "the others learn why";
  }
}

TEST(NcclFault, ARankThatDoesNotComeIsNamed) {
  ThreadWorld world(3, make_options(kShort));
  world.store(2).cut();
  std::vector<std::string> errors;
  try {
    errors = run(world, [](NcclRuntime&) { FAIL() << "the world was made"; });
  } catch (const std::exception& error) {
    FAIL() << "a store that is gone is no CommError: " << error.what();
  }
  EXPECT_THAT(errors[0], HasSubstr("starting NCCL for the world of 3 ranks"));
  EXPECT_THAT(std::vector({errors[0], errors[1]}), Contains(HasSubstr("rank 2 had not come")));
}

TEST(NcclFault, ASplitThatFailsOrStaysInProgressNamesTheGroup) {
  for (const auto kind :
       {NcclFault::Kind::kFails, NcclFault::Kind::kFailsLater, NcclFault::Kind::kNeverDone}) {
    ThreadWorld world(2, make_options(kShort));
    world.nccl().inject(nth_call(1, "CommSplit", 0), {kind, ncclSystemError, "out of handles"});
    const auto errors = run(world, [](NcclRuntime& runtime) {
      runtime.world()->subgroup({0, 1}, "pair");
      ADD_FAILURE() << "the group was made";
    });
    EXPECT_THAT(errors, Each(HasSubstr("group 'world'")));
    // An asynchronous error may be seen by the watchdog first, which has no operation under way.
    if (kind != NcclFault::Kind::kFailsLater) {
      EXPECT_THAT(errors,
                  Each(AllOf(HasSubstr("subgroup"), HasSubstr("on group 'world', operation 0"))));
    }
    if (kind != NcclFault::Kind::kNeverDone) {
      EXPECT_THAT(errors[1], HasSubstr("out of handles"));
    }
  }
}

// ---- Operations.
// ---------------------------------------------------------------------------------

/// What an operation's error must say, on a rank that has it at first hand.
const auto kNamesTheOperation =
    AllOf(HasSubstr("all_reduce of 7 Float by sum for 'layers.3' on group 'world', operation 4"));

TEST(NcclFault, AnOperationThatIsNeverDoneIsATimeoutThatSaysWhereTheOthersAre) {
  ThreadWorld world(3, make_options(kShort));
  world.nccl().inject(nth_call(1, "AllReduce", 4), {NcclFault::Kind::kNeverDone});
  const auto errors = run(world, reduce_ten_times);
  EXPECT_THAT(errors, Each(kNamesTheOperation));
  EXPECT_THAT(errors, Contains(AllOf(HasSubstr("was not done within 0.4 s"),
                                     HasSubstr("where this rank is"))));
}

TEST(NcclFault, AnAsynchronousErrorEndsEveryRankWithItsText) {
  ThreadWorld world(3, make_options(kLong));
  world.nccl().inject(nth_call(1, "AllReduce", 4),
                      {NcclFault::Kind::kFailsLater, ncclSystemError, "the NIC went away"});
  const auto errors = run(world, reduce_ten_times);
  EXPECT_THAT(errors, Each(AllOf(kNamesTheOperation, HasSubstr("the NIC went away"),
                                 HasSubstr("unhandled system error"))));
  EXPECT_THAT(errors[0], HasSubstr("rank 1 failed"));
  EXPECT_THAT(errors[2], HasSubstr("rank 1 failed"));
}

TEST(NcclFault, ACallThatFailsEndsEveryRankWithItsText) {
  ThreadWorld world(2, make_options(kLong));
  world.nccl().inject(nth_call(0, "AllReduce", 4),
                      {NcclFault::Kind::kFails, ncclUnhandledCudaError, "out of device memory"});
  const auto errors = run(world, reduce_ten_times);
  EXPECT_THAT(errors, Each(AllOf(kNamesTheOperation, HasSubstr("out of device memory"))));
}

TEST(NcclFault, AnotherRanksAbortIsNotTheCauseThatIsTold) {
  // Rank 1's failure makes NCCL tell the others of a remote error; what they say is rank 1's
  // reason.
  ThreadWorld world(3, make_options(kLong));
  world.nccl().tell_of_aborts();
  world.nccl().inject(nth_call(1, "AllReduce", 4),
                      {NcclFault::Kind::kFailsLater, ncclSystemError, "the NIC went away"});
  EXPECT_THAT(run(world, reduce_ten_times), Each(HasSubstr("the NIC went away")));
}

TEST(NcclFault, AnOperationThatOneRankDoesNotCallNamesTheRankThatIsElsewhere) {
  ThreadWorld world(3, make_options(kShort));
  const auto errors = run(world, [](NcclRuntime& runtime) {
    const auto stream = runtime.create_stream("side", StreamPriority::kNormal);
    for (int i = 0; i < 3; ++i) reduce_once(runtime, *stream);
    stream->synchronize();
    if (runtime.rank() == 2) {
      // It waits for something else.
      while (true) {
        std::this_thread::sleep_for(milliseconds(5));
        stream->synchronize();
      }
    }
    reduce_once(runtime, *stream);
    stream->synchronize();
  });
  for (const int rank : {0, 1}) {
    EXPECT_THAT(errors[rank], HasSubstr("all_reduce of 7 Float by sum for 'layers.3' on group "
                                        "'world', operation 3"));
  }
  EXPECT_THAT(errors, Contains(HasSubstr("rank 2 last issued operation 2, all_reduce of 7 Float by "
                                         "sum for 'layers.3', and has finished 2")));
}

TEST(NcclFault, ARankThatDiesIsMissedByItsNeighbourAndToldToAll) {
  ThreadWorldOptions options = make_options(kLong);
  options.settings.silence = milliseconds(400);
  ThreadWorld world(4, options);
  const auto errors = run(world, [](NcclRuntime& runtime) {
    const auto stream = runtime.create_stream("side", StreamPriority::kNormal);
    reduce_once(runtime, *stream);
    stream->synchronize();
    if (runtime.rank() == 2) throw ProcessEnds();
    reduce_once(runtime, *stream);
    stream->synchronize();
  });
  for (const int rank : {0, 1, 3}) {
    EXPECT_THAT(errors[rank], HasSubstr("rank 2 gave no sign of life for 0.4 s"));
  }
  EXPECT_THAT(errors[3], HasSubstr("rank 1 failed"));
}

TEST(NcclFault, AStoreThatIsGoneEndsTheRankThatNeedsIt) {
  ThreadWorldOptions options = make_options(kLong);
  options.settings.silence = milliseconds(400);
  ThreadWorld world(2, options);
  const auto errors = run(world, [&](NcclRuntime& runtime) {
    const auto stream = runtime.create_stream("side", StreamPriority::kNormal);
    reduce_once(runtime, *stream);
    stream->synchronize();
    if (runtime.rank() == 0) world.store(1).cut();
    while (true) {
      std::this_thread::sleep_for(milliseconds(5));
      reduce_once(runtime, *stream);
      stream->synchronize();
    }
  });
  EXPECT_THAT(errors[1], HasSubstr("the store on rank 0 is gone"));
  EXPECT_THAT(errors[0], HasSubstr("rank 1 gave no sign of life for 0.4 s"));
}

// Whatever a rank is blocked in when another fails comes back with that failure.
TEST(NcclFault, EveryWayToWaitComesBack) {
  const std::vector<std::function<void(NcclRuntime&)>> waits = {
      [](NcclRuntime& runtime) {
        const auto side = runtime.create_stream("side", StreamPriority::kNormal);
        reduce_once(runtime, *side);
        side->synchronize();
      },
      [](NcclRuntime& runtime) {
        const auto side = runtime.create_stream("side", StreamPriority::kNormal);
        reduce_once(runtime, *side);
        side->record()->synchronize();
      },
      [](NcclRuntime& runtime) {
        reduce_once(runtime, runtime.compute_stream());
        runtime.compute_stream().synchronize();
      },
      [](NcclRuntime& runtime) {
        const auto side = runtime.create_stream("side", StreamPriority::kNormal);
        reduce_once(runtime, *side);
        runtime.compute_stream().wait(side->record());
        runtime.compute_stream().synchronize();
      },
      [](NcclRuntime& runtime) { runtime.world()->barrier(); },
      [](NcclRuntime& runtime) {
        runtime.world()->subgroup({0, 1, 2}, "all");
      },
      // The end of the runtime itself: an error that nobody is there to get.
      [](NcclRuntime& runtime) {
        const auto side = runtime.create_stream("side", StreamPriority::kNormal);
        reduce_once(runtime, *side);
      },
  };
  for (size_t i = 0; i < waits.size(); ++i) {
    ThreadWorld world(3, make_options(kLong));
    const auto errors = run(world, [&](NcclRuntime& runtime) {
      runtime.world()->barrier();
      if (runtime.rank() == 1) throw comm::CommError("rank 1 gives up");
      waits[i](runtime);
    });
    EXPECT_EQ(errors[1], "rank 1 gives up");
    for (const int rank : {0, 2}) {
      if (i + 1 < waits.size()) {
        EXPECT_THAT(errors[rank], HasSubstr("rank 1")) << "way " << i;
      }
    }
  }
}

TEST(NcclFault, TheFirstErrorIsTheOneThatAllLaterUsesSay) {
  ThreadWorld world(2, make_options(kLong));
  world.nccl().inject(nth_call(1, "AllReduce", 0),
                      {NcclFault::Kind::kFailsLater, ncclSystemError, "the NIC went away"});
  run(world, [](NcclRuntime& runtime) {
    const auto side = runtime.create_stream("side", StreamPriority::kNormal);
    const auto message = [&](const std::function<void()>& use) {
      try {
        use();
      } catch (const comm::CommError& error) {
        return std::string(error.what());
      }
      return std::string("no error");
    };
    const std::string first = message([&] {
      reduce_once(runtime, *side);
      side->synchronize();
    });
    EXPECT_THAT(first, HasSubstr("the NIC went away"));
    const at::Tensor tensor = at::full({2}, 1.0);
    for (const auto& use : std::vector<std::function<void()>>{
             [&] { reduce_once(runtime, *side); }, [&] { side->run([] {}); },
             [&] { side->record(); }, [&] { runtime.compute_stream().wait(nullptr); },
             [&] { runtime.world()->barrier(); },
             [&] { runtime.world()->allocate(8, at::kFloat, *side); },
             [&] { runtime.world()->subgroup({runtime.rank()}, "self"); },
             [&] { runtime.create_stream("more", StreamPriority::kNormal); }}) {
      EXPECT_EQ(message(use), first);
    }
  });
}

// ---- The end.
// ------------------------------------------------------------------------------------

TEST(NcclFault, AnEndThatHangsIsCutShort) {
  ThreadWorld world(2, make_options(kShort));
  world.nccl().inject(nth_call(1, "CommFinalize", 0), {NcclFault::Kind::kNeverDone});
  EXPECT_THAT(run(world, reduce_ten_times), Each(IsEmpty()));
}

TEST(NcclFault, WorkThatIsStillQueuedIsDoneBeforeTheEnd) {
  ThreadWorldOptions options = make_options(kLong);
  options.devices.late = true;
  ThreadWorld world(3, options);
  const at::Tensor sums = at::full({3, 7}, 1.0);
  EXPECT_THAT(run(world,
                  [&](NcclRuntime& runtime) {
                    const auto side = runtime.create_stream("side", StreamPriority::kNormal);
                    runtime.world()->all_reduce(sums[runtime.rank()], ReduceOp::sum(), *side);
                  }),
              Each(IsEmpty()));
  EXPECT_TRUE(sums.equal(at::full({3, 7}, 3.0)));
}

TEST(NcclFault, GroupsStreamsAndMemoryMayOutliveTheRuntime) {
  ThreadWorld world(2, make_options(kLong));
  std::vector<comm::CommunicatorPtr> groups(2);
  std::vector<std::shared_ptr<comm::Stream>> streams(2);
  EXPECT_THAT(run(world,
                  [&](NcclRuntime& runtime) {
                    groups[runtime.rank()] = runtime.world()->subgroup({0, 1}, "pair");
                    streams[runtime.rank()] = runtime.create_stream("side", StreamPriority::kHigh);
                    reduce_once(runtime, *streams[runtime.rank()]);
                  }),
              Each(IsEmpty()));
  const at::Tensor tensor = at::full({2}, 1.0);
  EXPECT_THROW(groups[0]->all_reduce(tensor, ReduceOp::sum(), *streams[0]), comm::CommError);
}

}  // namespace
}  // namespace ppfsdp::nccl::testing
