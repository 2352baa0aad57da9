// What a simulated world promises as a whole: one rank at a time, the same run for the same seed,
// the right errors, and backward passes inside rank threads.
#include "sim/mesh/world.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

#include "src/comm/communicator.h"

namespace ppfsdp::sim {
namespace {

using comm::ReduceOp;
using comm::Runtime;
using comm::StreamPriority;

std::string failure_of(int n, const WorldOptions& options,
                       const std::function<void(Runtime&)>& fn) {
  try {
    run_world(n, options, fn);
  } catch (const c10::Error& e) {
    return e.what_without_backtrace();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "(no failure)";
}

std::string failure_of(int n, const std::function<void(Runtime&)>& fn) {
  return failure_of(n, WorldOptions(), fn);
}

/// The order in which ranks pass their points, as they see it.
std::string trace_of(int n, const WorldOptions& options) {
  std::string trace;
  run_world(n, options, [&](Runtime& runtime) {
    const auto stream = runtime.create_stream("side", StreamPriority::kNormal);
    at::Tensor tensor = at::full({3}, runtime.rank() + 1.0);
    for (int step = 0; step < 4; ++step) {
      trace += fmt::format("{}{} ", runtime.rank(), static_cast<char>('a' + step));
      stream->run([&trace, rank = runtime.rank()] { trace += fmt::format("s{} ", rank); });
      runtime.world()->all_reduce(tensor, ReduceOp::sum(), *stream);
      runtime.compute_stream().wait(stream->record());
    }
  });
  return trace;
}

TEST(World, every_rank_runs_once_in_worlds_of_1_to_256) {
  for (const int n : {1, 2, 3, 5, 7, 64, 256}) {
    for (const Schedule schedule : {Schedule::kRoundRobin, Schedule::kRandom, Schedule::kLazy}) {
      std::vector<int> runs(n);
      run_world(n, {.seed = 5, .schedule = schedule}, [&](Runtime& runtime) {
        EXPECT_EQ(runtime.world_size(), n);
        EXPECT_EQ(runtime.world()->rank(), runtime.rank());
        EXPECT_EQ(runtime.world()->size(), n);
        ++runs[runtime.rank()];
        const at::Tensor sum = at::full({2}, runtime.rank() + 1.0);
        runtime.world()->all_reduce(sum, ReduceOp::sum(), runtime.compute_stream());
        EXPECT_EQ(sum[1].item<double>(), n * (n + 1) / 2);
      });
      EXPECT_EQ(runs, std::vector<int>(n, 1));
    }
  }
}

TEST(World, exactly_one_rank_runs_at_a_time) {
  std::atomic<int> inside{0};
  run_world(8, {.seed = 1, .schedule = Schedule::kRandom}, [&](Runtime& runtime) {
    for (int step = 0; step < 50; ++step) {
      EXPECT_EQ(inside.fetch_add(1), 0);
      for (int spin = 0; spin < 1000; ++spin) EXPECT_EQ(inside.load(), 1);
      inside.fetch_sub(1);
      runtime.world()->barrier();
    }
  });
}

TEST(World, the_same_seed_gives_the_same_run) {
  for (const Schedule schedule : {Schedule::kRoundRobin, Schedule::kRandom, Schedule::kLazy}) {
    for (const uint64_t seed : {0, 1, 2}) {
      const WorldOptions options{.seed = seed, .schedule = schedule};
      EXPECT_EQ(trace_of(5, options), trace_of(5, options));
    }
  }
}

TEST(World, seeds_give_different_runs) {
  const auto trace = [](uint64_t seed) {
    return trace_of(5, {.seed = seed, .schedule = Schedule::kRandom});
  };
  EXPECT_NE(trace(0), trace(1));
  EXPECT_NE(trace(1), trace(2));
  EXPECT_NE(trace(0), trace_of(5, {.schedule = Schedule::kRoundRobin}));
}

TEST(World, the_random_schedule_runs_streams_both_before_and_behind_the_ranks) {
  // A schedule that always ran a stream at once, or always as late as it can, would hide one kind
  // of missing wait.
  int early = 0, late = 0;
  for (uint64_t seed = 0; seed < 64; ++seed) {
    run_world(2, {.seed = seed, .schedule = Schedule::kRandom}, [&](Runtime& runtime) {
      const auto stream = runtime.create_stream("side", StreamPriority::kNormal);
      bool ran = false;
      stream->run([&] { ran = true; });
      const comm::EventPtr event = stream->record();
      ++(ran ? early : late);
      event->synchronize();
      EXPECT_TRUE(ran);
    });
  }
  EXPECT_GT(early, 8);
  EXPECT_GT(late, 8);
}

TEST(World, a_rank_that_throws_ends_all_with_its_error) {
  std::vector<std::string> unwound;
  const std::string what = failure_of(4, [&](Runtime& runtime) {
    struct Guard {
      ~Guard() { unwound.push_back(fmt::format("rank {}", rank)); }
      std::vector<std::string>& unwound;
      int rank;
    } guard{unwound, runtime.rank()};
    runtime.world()->barrier();
    if (runtime.rank() == 2) throw std::runtime_error("out of luck");
    runtime.world()->barrier();
    ADD_FAILURE() << "rank " << runtime.rank() << " passed a barrier that rank 2 never reached";
  });
  EXPECT_EQ(what, "rank 2: out of luck");
  EXPECT_EQ(unwound.size(), 4u) << "every rank must unwind";
}

TEST(World, the_error_keeps_its_kind_and_the_original) {
  EXPECT_THROW(run_world(2, {}, [](Runtime&) { throw comm::CommError("x"); }), comm::CommError);
  EXPECT_THROW(run_world(2, {}, [](Runtime&) { TORCH_CHECK(false, "x"); }), c10::Error);
  EXPECT_EQ(failure_of(2, [](Runtime&) { TORCH_CHECK(false, "bad size 3"); }),
            "rank 0: bad size 3");
  EXPECT_EQ(failure_of(1, [](Runtime&) { throw 3; }),
            "rank 0: an exception that is no std::exception");
  try {
    run_world(3, {}, [](Runtime& runtime) {
      runtime.world()->barrier();
      if (runtime.rank() == 1) throw std::out_of_range("y");
    });
    FAIL();
  } catch (const std::exception& e) {
    EXPECT_THROW(std::rethrow_if_nested(e), std::out_of_range);
  }
}

TEST(World, a_rank_that_unwinds_may_communicate_in_a_destructor) {
  // A destructor that threw would end the process.
  const std::string what = failure_of(3, [&](Runtime& runtime) {
    const auto stream = runtime.create_stream("side", StreamPriority::kNormal);
    struct Guard {
      ~Guard() {
        runtime.world()->barrier();
        stream.run([] {});
        stream.synchronize();
      }
      Runtime& runtime;
      comm::Stream& stream;
    } guard{runtime, *stream};
    if (runtime.rank() == 1) throw std::runtime_error("first");
    runtime.world()->barrier();
    runtime.world()->barrier();
  });
  EXPECT_EQ(what, "rank 1: first");
}

TEST(World, an_error_survives_code_that_swallows_exceptions) {
  const std::string what = failure_of(3, [&](Runtime& runtime) {
    if (runtime.rank() == 0) throw std::runtime_error("first");
    for (int attempt = 0; attempt < 3; ++attempt) {
      try {
        runtime.world()->barrier();
        ADD_FAILURE() << "passed";
      } catch (const std::exception&) {
      }
    }
  });
  EXPECT_EQ(what, "rank 0: first");
}

TEST(World, a_failed_world_leaves_the_next_one_alone) {
  EXPECT_NE(failure_of(4, [](Runtime&) { throw std::runtime_error("x"); }), "(no failure)");
  EXPECT_EQ(failure_of(4, [](Runtime& runtime) { runtime.world()->barrier(); }), "(no failure)");
}

TEST(World, a_rank_that_returns_while_others_wait_is_named) {
  const std::string what = failure_of(3, [](Runtime& runtime) {
    if (runtime.rank() == 1) return;
    const at::Tensor tensor = at::ones({4});
    runtime.world()->all_reduce(tensor, ReduceOp::sum(), runtime.compute_stream());
  });
  EXPECT_EQ(what,
            "deadlock: no rank can go on. ranks 0, 2: waiting for all_reduce #0 on group 'world' "
            "(returned without it: rank 1); rank 1: returned");
}

TEST(World, a_deadlock_says_what_each_rank_waits_for) {
  const std::string what = failure_of(3, [](Runtime& runtime) {
    const auto stream = runtime.create_stream("gather", StreamPriority::kNormal);
    const at::Tensor tensor = at::ones({4});
    if (runtime.rank() == 0) {
      runtime.world()->recv(tensor, 1, *stream);
      stream->synchronize();
    } else if (runtime.rank() == 1) {
      runtime.world()->recv(tensor, 0, *stream);
      const auto other = runtime.create_stream("other", StreamPriority::kNormal);
      other->wait(stream->record());
      runtime.compute_stream().wait(other->record());
    } else {
      runtime.world()->barrier();
    }
  });
  EXPECT_EQ(
      what,
      "deadlock: no rank can go on. "
      "rank 0: waiting for an event of stream 'gather', which is at send #0 from rank 1 to rank "
      "0 on group 'world' (not issued by rank 1); "
      "rank 1: waiting for an event of stream 'other', which is at an event of stream 'gather', "
      "which is at send #0 from rank 0 to rank 1 on group 'world' (not issued by rank 0); "
      "rank 2: waiting for barrier #0 on group 'world' (not issued by rank 0, rank 1)");
}

TEST(World, work_that_can_never_run_is_an_error_though_all_ranks_returned) {
  const std::string what = failure_of(2, [](Runtime& runtime) {
    const auto stream = runtime.create_stream("side", StreamPriority::kNormal);
    if (runtime.rank() == 0) {
      runtime.world()->all_reduce(at::ones({4}), ReduceOp::sum(), *stream);
    }
  });
  EXPECT_EQ(what,
            "all ranks have returned, but work is left that can never run: stream 'side' of rank 0 "
            "is at all_reduce #0 on group 'world' (returned without it: rank 1)");
}

TEST(World, what_is_queued_when_a_rank_returns_still_runs) {
  int ran = 0;
  run_world(3, {}, [&](Runtime& runtime) {
    const auto stream = runtime.create_stream("side", StreamPriority::kNormal);
    const at::Tensor tensor = at::ones({4});
    runtime.world()->all_reduce(tensor, ReduceOp::sum(), *stream);
    stream->run([&ran, tensor] { ran += tensor[0].item<float>() == 3.0f; });
  });
  EXPECT_EQ(ran, 3);
}

TEST(World, refuses_what_it_cannot_run) {
  EXPECT_EQ(failure_of(0, [](Runtime&) {}), "run_world: n must be in [1, 1024], got 0");
  EXPECT_EQ(failure_of(1025, [](Runtime&) {}), "run_world: n must be in [1, 1024], got 1025");
  EXPECT_EQ(failure_of(2, nullptr), "run_world: fn is empty");
  // More stack than the address space holds.
  EXPECT_NE(failure_of(2, {.stack_bytes = size_t{1} << 60}, [](Runtime&) {})
                .find("cannot start the thread of rank 0"),
            std::string::npos);
}

TEST(World, a_runtime_is_for_its_own_rank_only) {
  Runtime* first = nullptr;
  EXPECT_EQ(failure_of(2,
                       [&](Runtime& runtime) {
                         if (runtime.rank() == 0) first = &runtime;
                         runtime.world()->barrier();
                         if (runtime.rank() == 1) first->world()->barrier();
                         runtime.world()->barrier();
                       }),
            "rank 1: barrier of rank 0: called by rank 1; each rank must use its own runtime");
  comm::CommunicatorPtr kept;
  run_world(1, {}, [&](Runtime& runtime) { kept = runtime.world(); });
  try {
    kept->barrier();
    FAIL() << "a communicator must not work after its world";
  } catch (const c10::Error& e) {
    EXPECT_STREQ(e.what_without_backtrace(), "barrier of rank 0: called outside run_world");
  }
}

/// Gradients pass through unchanged, and are all-reduced on the way.
struct AllReduceGradient : torch::autograd::Function<AllReduceGradient> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                            int64_t runtime) {
    context->saved_data["runtime"] = runtime;
    return input.view_as(input);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    auto& runtime = *reinterpret_cast<Runtime*>(context->saved_data["runtime"].toInt());
    const at::Tensor sum = gradients[0].clone();
    runtime.world()->all_reduce(sum, ReduceOp::sum(), runtime.compute_stream());
    return {sum, at::Tensor()};
  }
};

TEST(World, ranks_run_backward_at_once_with_collectives_in_hooks) {
  for (const int n : {1, 4, 33}) {
    for (const Schedule schedule : {Schedule::kRandom, Schedule::kLazy}) {
      run_world(n, {.seed = 3, .schedule = schedule}, [&](Runtime& runtime) {
        const at::Tensor leaf = at::full({3}, 2.0, at::kDouble).requires_grad_();
        at::Tensor x = leaf;
        for (int layer = 0; layer < 3; ++layer) {
          x = AllReduceGradient::apply(x.mul(runtime.rank() + 1.0),
                                       reinterpret_cast<int64_t>(&runtime));
        }
        x.sum().backward();
        // d/dleaf: each layer multiplies by rank + 1 after summing over ranks what the layers above
        // gave: rank r ends with (r + 1) * S^2 * n, S = sum of (r + 1).
        const double s = n * (n + 1) / 2.0;
        EXPECT_EQ(leaf.grad()[0].item<double>(), (runtime.rank() + 1.0) * s * s * n);
      });
    }
  }
}

// With one generator for all, a rank's draws would depend on who drew before it.
TEST(World, each_rank_draws_what_the_process_would_have_drawn) {
  at::manual_seed(5);
  const at::Tensor expected = at::rand({7});
  for (const uint64_t seed : {1, 2}) {
    at::manual_seed(5);
    run_world(3, {.seed = seed, .schedule = Schedule::kRandom}, [&](Runtime& runtime) {
      const at::Tensor first = at::rand({3}, runtime.default_generator());
      runtime.world()->barrier();
      const at::Tensor second = at::rand({4}, runtime.default_generator());
      EXPECT_TRUE(at::equal(at::cat({first, second}), expected)) << "rank " << runtime.rank();
    });
    EXPECT_TRUE(at::equal(at::rand({7}), expected)) << "the process's generator was moved";
  }
}

TEST(World, an_error_in_one_ranks_backward_ends_the_others_backward) {
  const std::string what = failure_of(4, [&](Runtime& runtime) {
    const at::Tensor leaf = at::full({3}, 2.0).requires_grad_();
    const at::Tensor x =
        AllReduceGradient::apply(leaf.mul(2.0), reinterpret_cast<int64_t>(&runtime));
    x.register_hook([&](const at::Tensor& gradient) {
      if (runtime.rank() == 3) throw std::runtime_error("hook");
      return gradient;
    });
    x.sum().backward();
    ADD_FAILURE() << "rank " << runtime.rank() << " finished backward";
  });
  EXPECT_EQ(what, "rank 3: hook");
}

}  // namespace
}  // namespace ppfsdp::sim
