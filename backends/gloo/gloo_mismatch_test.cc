// Ranks that do not call the same thing: each must be told, and which rank differs. Inside Gloo a
// mismatch of sizes ends the process, and this test with it.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

#include "backends/gloo/testing/thread_world.h"
#include "src/comm/communicator.h"

namespace ppfsdp::gloo {
namespace {

using comm::ReduceOp;
using comm::Runtime;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::EndsWith;
using ::testing::HasSubstr;

/// The CommErrors of all ranks, by rank; empty where there was none.
std::vector<std::string> errors_of(int n, const GlooOptions& options,
                                   const std::function<void(Runtime&)>& fn) {
  std::vector<std::string> errors(n);
  testing::run_threads(n, options, [&](Runtime& runtime) {
    try {
      fn(runtime);
    } catch (const comm::CommError& error) {
      errors[runtime.rank()] = error.what();
    }
  });
  return errors;
}

GlooOptions checked_options() {
  GlooOptions options;
  // Long: an error that comes by timeout fails the test for its text.
  options.timeout = std::chrono::seconds(60);
  return options;
}

at::Tensor ones(int64_t numel, at::ScalarType dtype = at::kFloat) {
  return at::full({numel}, 1.0, dtype);
}

TEST(GlooMismatch, OfSizeNamesTheRankThatDiffersOnEveryRank) {
  const auto errors = errors_of(4, checked_options(), [](Runtime& runtime) {
    runtime.world()->barrier();
    runtime.world()->all_reduce(ones(runtime.rank() == 2 ? 12 : 10), ReduceOp::sum(),
                                runtime.compute_stream());
  });
  EXPECT_THAT(errors,
              Each(AllOf(HasSubstr("on group 'world', operation 1: rank 2 differs: it calls "
                                   "all_reduce of 12 Float by sum, rank 0 calls "
                                   "all_reduce of 10 Float by sum"))));
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_THAT(errors[rank], EndsWith("this is rank " + std::to_string(rank)));
  }
}

TEST(GlooMismatch, OfRankZeroIsNotBlamedOnTheOthers) {
  const auto errors = errors_of(3, checked_options(), [](Runtime& runtime) {
    runtime.world()->broadcast(ones(runtime.rank() == 0 ? 3 : 4), 0, runtime.compute_stream());
  });
  EXPECT_THAT(errors, Each(HasSubstr("rank 0 differs: it calls broadcast of 3 Float from rank 0, "
                                     "rank 1 calls broadcast of 4 Float from rank 0")));
}

TEST(GlooMismatch, OfDtypeReductionRootAndOperationIsNamed) {
  const auto check = [](const std::string& expected, const std::function<void(Runtime&)>& fn) {
    EXPECT_THAT(errors_of(2, checked_options(), fn), Each(HasSubstr(expected)));
  };
  check(
      "rank 1 differs: it calls all_reduce of 8 BFloat16 by avg, rank 0 calls all_reduce of 8 "
      "Float by avg",
      [](Runtime& runtime) {
        runtime.world()->all_reduce(ones(8, runtime.rank() == 0 ? at::kFloat : at::kBFloat16),
                                    ReduceOp::avg(), runtime.compute_stream());
      });
  check(
      "rank 1 differs: it calls all_reduce of 8 Float by premul_sum(0.25), rank 0 calls "
      "all_reduce of 8 Float by premul_sum(0.5)",
      [](Runtime& runtime) {
        runtime.world()->all_reduce(ones(8), ReduceOp::premul_sum(0.5 / (runtime.rank() + 1)),
                                    runtime.compute_stream());
      });
  check("rank 1 differs: it calls broadcast of 8 Float from rank 1", [](Runtime& runtime) {
    runtime.world()->broadcast(ones(8), runtime.rank(), runtime.compute_stream());
  });
  check("rank 1 differs: it calls barrier, rank 0 calls all_gather_into of 16 Float",
        [](Runtime& runtime) {
          if (runtime.rank() == 1) return runtime.world()->barrier();
          runtime.world()->all_gather_into(ones(16), ones(8), runtime.compute_stream());
        });
  check("rank 1 differs: it calls reduce_scatter of 4 Float by sum", [](Runtime& runtime) {
    const int64_t numel = runtime.rank() == 0 ? 3 : 2;
    runtime.world()->reduce_scatter(ones(numel), ones(2 * numel), ReduceOp::sum(),
                                    runtime.compute_stream());
  });
}

TEST(GlooMismatch, OfSplitsNamesBothEndsOnEveryRank) {
  const auto errors = errors_of(3, checked_options(), [](Runtime& runtime) {
    // Rank 0 sends rank 1 two elements; rank 1 expects one.
    const std::vector<int64_t> sends =
        runtime.rank() == 0 ? std::vector<int64_t>{1, 2, 1} : std::vector<int64_t>{1, 1, 1};
    const std::vector<int64_t> receives = {1, 1, 1};
    runtime.world()->all_to_all(ones(3), ones(runtime.rank() == 0 ? 4 : 3), receives, sends,
                                runtime.compute_stream());
  });
  EXPECT_THAT(errors, Each(HasSubstr("rank 0 sends 2 elements to rank 1, which expects 1")));
}

TEST(GlooMismatch, OfAMessageIsToldToBothEnds) {
  const auto errors = errors_of(2, checked_options(), [](Runtime& runtime) {
    if (runtime.rank() == 0) {
      runtime.world()->send(ones(4), 1, runtime.compute_stream());
    } else {
      runtime.world()->recv(ones(5), 0, runtime.compute_stream());
    }
  });
  EXPECT_THAT(errors, Each(HasSubstr("rank 0 sends 4 Float, rank 1 receives 5 Float")));
}

TEST(GlooMismatch, OfSubgroupMembersIsToldToAll) {
  const auto errors = errors_of(3, checked_options(), [](Runtime& runtime) {
    const bool odd = runtime.rank() == 2;
    runtime.world()->subgroup(odd ? std::vector<int>{1, 2} : std::vector<int>{0, 1, 2}, "part");
  });
  EXPECT_THAT(errors, Each(HasSubstr("rank 0 passes the members [0, 1, 2], but rank 2 passes "
                                     "[1, 2]")));
}

TEST(GlooMismatch, OfASubgroupsNameIsToldToAll) {
  const auto errors = errors_of(3, checked_options(), [](Runtime& runtime) {
    runtime.world()->subgroup({0, 1, 2}, runtime.rank() == 1 ? "tp" : "dp");
  });
  EXPECT_THAT(errors, Each(HasSubstr("subgroup on group 'world', operation 0: rank 0 calls the new "
                                     "group 'dp', but rank 1 calls it 'tp'")));
}

TEST(GlooMismatch, OfGroupsMadeInDifferentOrdersIsToldToAll) {
  const auto errors = errors_of(4, checked_options(), [](Runtime& runtime) {
    const int rank = runtime.rank(), row = rank / 2, column = rank % 2;
    const std::vector<int> dp = {column, column + 2}, tp = {2 * row, 2 * row + 1};
    runtime.world()->subgroup(rank == 1 ? tp : dp, "dim");
  });
  EXPECT_THAT(errors, Each(HasSubstr("on group 'world', operation 0: rank 1 passes the members "
                                     "[0, 1], but rank 0 passes [0, 2]")));
}

// Modules of one size: without their names the gathers and reductions would pair up.
TEST(GlooMismatch, OfLabelsNamesBoth) {
  const auto check = [](const std::string& operation,
                        const std::function<void(Runtime&, const char*)>& fn) {
    const auto errors = errors_of(3, checked_options(), [&](Runtime& runtime) {
      fn(runtime, runtime.rank() == 1 ? "layers.1" : "layers.0");
    });
    EXPECT_THAT(errors, Each(HasSubstr("on group 'world', operation 0: rank 1 differs: it calls " +
                                       operation + " for 'layers.1', rank 0 calls " + operation +
                                       " for 'layers.0'")));
  };
  check("all_gather_into of 12 Float", [](Runtime& runtime, const char* label) {
    runtime.world()->all_gather_into(ones(12), ones(4), runtime.compute_stream(), label);
  });
  check("reduce_scatter of 12 Float by avg", [](Runtime& runtime, const char* label) {
    runtime.world()->reduce_scatter(ones(4), ones(12), ReduceOp::avg(), runtime.compute_stream(),
                                    label);
  });
  // Whole, and by parts.
  for (const int64_t numel : {10, 100000}) {
    check("all_reduce of " + std::to_string(numel) + " Float by sum", [&](Runtime& runtime,
                                                                          const char* label) {
      runtime.world()->all_reduce(ones(numel), ReduceOp::sum(), runtime.compute_stream(), label);
    });
  }
}

// Ranks in different groups wait for each other; each is told where it waits and for whom.
TEST(GlooMismatch, OfGroupsIsATimeoutThatNamesThem) {
  GlooOptions options;
  options.timeout = std::chrono::milliseconds(300);
  const auto errors = errors_of(2, options, [](Runtime& runtime) {
    const auto a = runtime.world()->subgroup({0, 1}, "a");
    const auto b = runtime.world()->subgroup({0, 1}, "b");
    (runtime.rank() == 0 ? a : b)->all_reduce(ones(3), ReduceOp::sum(), runtime.compute_stream());
  });
  for (int rank = 0; rank < 2; ++rank) {
    const std::string other = "rank " + std::to_string(1 - rank);
    EXPECT_THAT(errors[rank], HasSubstr(std::string("all_reduce of 3 Float by sum on group '") +
                                        (rank == 0 ? "a" : "b") + "', operation 0: " + other));
    EXPECT_THAT(errors[rank], ::testing::AnyOf(HasSubstr("did not send within 0.3 s"),
                                               HasSubstr("closed its connection")));
  }
}

TEST(GlooMismatch, OnASideStreamIsThrownByTheWaitAndByAllThatComesLater) {
  const auto errors = errors_of(2, checked_options(), [](Runtime& runtime) {
    const auto stream = runtime.create_stream("side", comm::StreamPriority::kNormal);
    bool ran = false;
    runtime.world()->all_reduce(ones(4 + runtime.rank()), ReduceOp::sum(), *stream);
    stream->run([&] { ran = true; });
    const comm::EventPtr event = stream->record();
    EXPECT_THROW(runtime.compute_stream().wait(event), comm::CommError);
    EXPECT_FALSE(ran) << "work behind a failed operation must not run";
    EXPECT_THROW(event->synchronize(), comm::CommError);
    EXPECT_THROW(stream->record()->synchronize(), comm::CommError);
    EXPECT_THROW(stream->run([] {}), comm::CommError);
    runtime.world()->barrier();
  });
  EXPECT_THAT(errors, Each(HasSubstr("ended with an earlier failure: all_reduce of")));
}

TEST(GlooMismatch, ThatIsNotCheckedIsATimeoutAndHarmless) {
  GlooOptions options;
  options.timeout = std::chrono::milliseconds(300);
  options.checked = 0;
  const auto errors = errors_of(2, options, [](Runtime& runtime) {
    // Number 0 of 64 is always checked.
    runtime.world()->barrier();
    runtime.world()->all_reduce(ones(runtime.rank() == 0 ? 10 : 1000), ReduceOp::sum(),
                                runtime.compute_stream());
  });
  for (int rank = 0; rank < 2; ++rank) {
    // Whoever's time is up first closes its connections, which the other may see first.
    EXPECT_THAT(errors[rank], ::testing::AnyOf(HasSubstr("did not send within 0.3 s"),
                                               HasSubstr("closed its connection")));
    EXPECT_THAT(errors[rank], HasSubstr("on group 'world', operation 1"));
  }
}

TEST(GlooMismatch, OfLabelsThatAreNotCheckedMovesNothing) {
  GlooOptions options;
  options.timeout = std::chrono::milliseconds(300);
  options.checked = 0;
  const auto errors = errors_of(2, options, [](Runtime& runtime) {
    runtime.world()->barrier();
    const at::Tensor tensor = ones(3);
    const char* label = runtime.rank() == 0 ? "layers.0" : "layers.1";
    try {
      runtime.world()->all_reduce(tensor, ReduceOp::sum(), runtime.compute_stream(), label);
    } catch (const comm::CommError&) {
      EXPECT_TRUE(tensor.equal(ones(3)));
      throw;
    }
  });
  EXPECT_THAT(errors, Each(HasSubstr("on group 'world', operation 1: rank ")));
}

TEST(GlooMismatch, IsFoundAmongUncheckedCallsWithinSixtyFour) {
  GlooOptions options = checked_options();
  options.checked = 0;
  const auto errors = errors_of(2, options, [](Runtime& runtime) {
    const at::Tensor empty = at::empty({0});
    // Calls that transfer nothing, so that only the check can tell them apart.
    for (int i = 0; i < 64; ++i) {
      runtime.world()->all_reduce(empty, ReduceOp::sum(), runtime.compute_stream());
    }
    runtime.world()->all_reduce(empty, runtime.rank() == 0 ? ReduceOp::sum() : ReduceOp::max(),
                                runtime.compute_stream());
  });
  EXPECT_THAT(errors, Each(HasSubstr("operation 64: rank 1 differs")));
}

}  // namespace
}  // namespace ppfsdp::gloo
