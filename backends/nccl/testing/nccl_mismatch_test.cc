// Ranks that do not call the same thing. NCCL would hang, or give wrong values: the backend must
// tell each rank which rank differs, before anything moves. The fake hangs, so that a difference
// that is not found ends by timeout, whose text fails the test.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

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
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

ThreadWorldOptions make_options(uint64_t checked = 256) {
  ThreadWorldOptions options;
  options.settings.timeout = std::chrono::seconds(30);
  options.settings.checked = checked;
  options.settings.poll = std::chrono::milliseconds(5);
  options.settings.report = std::chrono::milliseconds(10);
  return options;
}

at::Tensor ones(int64_t numel, at::ScalarType dtype = at::kFloat) {
  return at::full({numel}, 1.0, dtype);
}

/// The errors of all ranks of a world in which nothing is left over or misused.
std::vector<std::string> errors_of(int n, const std::function<void(NcclRuntime&)>& fn,
                                   const ThreadWorldOptions& options = make_options()) {
  ThreadWorld world(n, options);
  const auto errors = world.run(fn);
  EXPECT_THAT(world.find_faults(), IsEmpty());
  return errors;
}

TEST(NcclMismatch, OfSizeNamesTheRankThatDiffersOnEveryRankAndMovesNothing) {
  ThreadWorld world(4, make_options());
  const auto errors = world.run([](NcclRuntime& runtime) {
    runtime.world()->barrier();
    const at::Tensor tensor = ones(runtime.rank() == 2 ? 12 : 10);
    try {
      runtime.world()->all_reduce(tensor, ReduceOp::sum(), runtime.compute_stream());
    } catch (const comm::CommError&) {
      EXPECT_TRUE(tensor.equal(ones(tensor.numel())));
      throw;
    }
  });
  EXPECT_THAT(errors, Each(HasSubstr("on group 'world', operation 1: rank 2 differs: it calls "
                                     "all_reduce of 12 Float by sum, rank 0 calls "
                                     "all_reduce of 10 Float by sum")));
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_THAT(errors[rank], HasSubstr("this is rank " + std::to_string(rank)));
    for (const NcclCall& call : world.nccl().calls(rank)) {
      EXPECT_FALSE(call.function == "AllReduce" && call.dtype == ncclFloat32)
          << "the operation was begun: " << to_string(call);
    }
  }
  EXPECT_THAT(world.find_faults(), IsEmpty());
}

TEST(NcclMismatch, OfRankZeroIsNotBlamedOnTheOthers) {
  EXPECT_THAT(errors_of(3,
                        [](NcclRuntime& runtime) {
                          runtime.world()->broadcast(ones(runtime.rank() == 0 ? 3 : 4), 0,
                                                     runtime.compute_stream());
                        }),
              Each(HasSubstr("rank 0 differs: it calls broadcast of 3 Float from rank 0, "
                             "rank 1 calls broadcast of 4 Float from rank 0")));
}

TEST(NcclMismatch, OfDtypeReductionRootAndOperationIsNamed) {
  const auto check = [](const std::string& expected, const std::function<void(NcclRuntime&)>& fn) {
    EXPECT_THAT(errors_of(2, fn), Each(HasSubstr(expected)));
  };
  check(
      "rank 1 differs: it calls all_reduce of 8 BFloat16 by avg, rank 0 calls all_reduce of 8 "
      "Float by avg",
      [](NcclRuntime& runtime) {
        runtime.world()->all_reduce(ones(8, runtime.rank() == 0 ? at::kFloat : at::kBFloat16),
                                    ReduceOp::avg(), runtime.compute_stream());
      });
  check(
      "rank 1 differs: it calls all_reduce of 8 Float by premul_sum(0.25), rank 0 calls "
      "all_reduce of 8 Float by premul_sum(0.5)",
      [](NcclRuntime& runtime) {
        runtime.world()->all_reduce(ones(8), ReduceOp::premul_sum(0.5 / (runtime.rank() + 1)),
                                    runtime.compute_stream());
      });
  check("rank 1 differs: it calls broadcast of 8 Float from rank 1", [](NcclRuntime& runtime) {
    runtime.world()->broadcast(ones(8), runtime.rank(), runtime.compute_stream());
  });
  check("rank 1 differs: it calls barrier, rank 0 calls all_gather_into of 16 Float",
        [](NcclRuntime& runtime) {
          if (runtime.rank() == 1) return runtime.world()->barrier();
          runtime.world()->all_gather_into(ones(16), ones(8), runtime.compute_stream());
        });
  check("rank 1 differs: it calls reduce_scatter of 4 Float by sum", [](NcclRuntime& runtime) {
    const int64_t numel = runtime.rank() == 0 ? 3 : 2;
    runtime.world()->reduce_scatter(ones(numel), ones(2 * numel), ReduceOp::sum(),
                                    runtime.compute_stream());
  });
}

TEST(NcclMismatch, OfSplitsNamesBothEndsOnEveryRank) {
  EXPECT_THAT(errors_of(3,
                        [](NcclRuntime& runtime) {
                          // Rank 0 sends rank 1 two elements; rank 1 expects one.
                          const bool first = runtime.rank() == 0;
                          const std::vector<int64_t> sends =
                              first ? std::vector<int64_t>{1, 2, 1} : std::vector<int64_t>{1, 1, 1};
                          const std::vector<int64_t> receives = {1, 1, 1};
                          runtime.world()->all_to_all(ones(3), ones(first ? 4 : 3), receives, sends,
                                                      runtime.compute_stream());
                        }),
              Each(HasSubstr("rank 0 sends 2 elements to rank 1, which expects 1")));
}

TEST(NcclMismatch, OfAMessageIsFoundByItsReceiverAndToldToTheSender) {
  const auto errors = errors_of(2, [](NcclRuntime& runtime) {
    if (runtime.rank() == 0) {
      runtime.world()->send(ones(4), 1, runtime.compute_stream());
      runtime.compute_stream().synchronize();
    } else {
      runtime.world()->recv(ones(5), 0, runtime.compute_stream());
    }
  });
  EXPECT_THAT(errors, Each(HasSubstr("rank 0 sends 4 Float, rank 1 receives 5 Float")));
}

TEST(NcclMismatch, OfASubgroupsMembersAndNameIsToldToAll) {
  EXPECT_THAT(errors_of(3,
                        [](NcclRuntime& runtime) {
                          const bool odd = runtime.rank() == 2;
                          runtime.world()->subgroup(
                              odd ? std::vector<int>{1, 2} : std::vector<int>{0, 1, 2}, "part");
                        }),
              Each(HasSubstr("rank 0 passes the members [0, 1, 2], but rank 2 passes [1, 2]")));
  EXPECT_THAT(errors_of(3,
                        [](NcclRuntime& runtime) {
                          runtime.world()->subgroup({0, 1, 2}, runtime.rank() == 1 ? "tp" : "dp");
                        }),
              Each(HasSubstr("subgroup on group 'world', operation 0: rank ")));
}

// Modules of one size: without their names the gathers and reductions would pair up.
TEST(NcclMismatch, OfLabelsNamesBoth) {
  EXPECT_THAT(
      errors_of(3,
                [](NcclRuntime& runtime) {
                  runtime.world()->all_gather_into(ones(12), ones(4), runtime.compute_stream(),
                                                   runtime.rank() == 1 ? "layers.1" : "layers.0");
                }),
      Each(
          HasSubstr("on group 'world', operation 0: rank 1 differs: it calls all_gather_into of 12 "
                    "Float for 'layers.1', rank 0 calls all_gather_into of 12 Float for "
                    "'layers.0'")));
}

TEST(NcclMismatch, OnASideStreamIsThrownByTheWaitAndByAllThatComesLater) {
  const auto errors = errors_of(2, [](NcclRuntime& runtime) {
    const auto stream = runtime.create_stream("side", StreamPriority::kNormal);
    runtime.world()->all_reduce(ones(4 + runtime.rank()), ReduceOp::sum(), *stream);
    EXPECT_THROW(runtime.compute_stream().wait(stream->record()), comm::CommError);
    EXPECT_THROW(stream->record(), comm::CommError);
    EXPECT_THROW(stream->run([] {}), comm::CommError);
    EXPECT_THROW(stream->synchronize(), comm::CommError);
    runtime.world()->barrier();
  });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("on group 'world', operation 0: rank 1 differs"),
                                 HasSubstr("all_reduce of 5 Float by sum"))));
}

// Beyond the first `checked` every 64th call is compared beside the operation, and the watchdog
// finds the difference, though nobody asks and the operations themselves fit.
TEST(NcclMismatch, AmongUncheckedCallsIsFoundWithinSixtyFour) {
  const auto errors = errors_of(
      3,
      [](NcclRuntime& runtime) {
        const auto stream = runtime.create_stream("side", StreamPriority::kNormal);
        const at::Tensor tensor = ones(3);
        for (int i = 0; i < 64; ++i) {
          runtime.world()->all_reduce(tensor, ReduceOp::max(), *stream, "layers.0");
        }
        runtime.world()->all_reduce(tensor, ReduceOp::max(), *stream,
                                    runtime.rank() == 1 ? "layers.1" : "layers.0");
        for (int i = 0; i < 100000; ++i) {
          stream->synchronize();
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
      },
      make_options(/*checked=*/1));
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("on group 'world', operation 64: rank 1 differs"),
                                 HasSubstr("for 'layers.1'"))));
}

// There the comparison comes before the operation that hangs.
TEST(NcclMismatch, AmongUncheckedCallsThatHangsIsFoundToo) {
  const auto errors = errors_of(
      3,
      [](NcclRuntime& runtime) {
        const auto stream = runtime.create_stream("side", StreamPriority::kNormal);
        for (int i = 0; i < 64; ++i) {
          runtime.world()->all_reduce(ones(3), ReduceOp::max(), *stream);
        }
        runtime.world()->all_reduce(ones(runtime.rank() == 1 ? 4 : 3), ReduceOp::max(), *stream);
        stream->synchronize();
      },
      make_options(/*checked=*/1));
  EXPECT_THAT(errors, Each(HasSubstr("on group 'world', operation 64: rank 1 differs: it calls "
                                     "all_reduce of 4 Float by max")));
}

// Groups of which ranks use another first: nothing to find by comparison, but no hang.
TEST(NcclMismatch, OfGroupsIsATimeoutThatNamesThem) {
  ThreadWorldOptions options = make_options();
  options.settings.timeout = std::chrono::milliseconds(400);
  const auto errors = errors_of(
      2,
      [](NcclRuntime& runtime) {
        const auto a = runtime.world()->subgroup({0, 1}, "a");
        const auto b = runtime.world()->subgroup({0, 1}, "b");
        (runtime.rank() == 0 ? a : b)
            ->all_reduce(ones(3), ReduceOp::sum(), runtime.compute_stream());
      },
      options);
  // Whoever's time is up first tells the other.
  int by_itself = 0;
  for (int rank = 0; rank < 2; ++rank) {
    const auto waits_in = [](int rank) {
      return std::string("all_reduce of 3 Float by sum on group '") + (rank == 0 ? "a" : "b") +
             "', operation 0";
    };
    const int other = 1 - rank;
    EXPECT_THAT(errors[rank],
                AnyOf(HasSubstr(waits_in(rank)),
                      HasSubstr("rank " + std::to_string(other) + " failed: " + waits_in(other))));
    if (errors[rank].find(waits_in(rank) + ": was not done within 0.4 s") != std::string::npos) {
      ++by_itself;
    }
  }
  EXPECT_GE(by_itself, 1);
}

}  // namespace
}  // namespace ppfsdp::nccl::testing
