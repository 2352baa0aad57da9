// Ranks that do not match are told which differs and how; results that are not there yet are NaN.
#include "sim/mesh/operation.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "sim/mesh/world.h"
#include "src/comm/communicator.h"

namespace ppfsdp::sim {
namespace {

using comm::ReduceOp;
using comm::Runtime;
using comm::StreamPriority;

/// The error of a world of three in which rank 2 makes the second call and the others the first.
std::string mismatch(const std::function<void(Runtime&, comm::Stream&)>& most,
                     const std::function<void(Runtime&, comm::Stream&)>& other) {
  try {
    run_world(3, {}, [&](Runtime& runtime) {
      runtime.world()->barrier();
      const auto stream = runtime.create_stream("side", StreamPriority::kNormal);
      (runtime.rank() == 2 ? other : most)(runtime, *stream);
      stream->synchronize();
    });
  } catch (const comm::CommError& e) {
    return e.what();
  }
  return "(no CommError)";
}

TEST(Mismatch, operation) {
  EXPECT_EQ(mismatch(
                [](Runtime& runtime, comm::Stream& stream) {
                  runtime.world()->all_gather_into(at::zeros({12}), at::zeros({4}), stream);
                },
                [](Runtime& runtime, comm::Stream& stream) {
                  runtime.world()->reduce_scatter(at::zeros({4}), at::zeros({12}), ReduceOp::avg(),
                                                  stream);
                }),
            "rank 2: all_gather_into #1 on group 'world': rank 2 called reduce_scatter(Float, 4 "
            "elements, avg), but rank 0 called all_gather_into(Float, 4 elements)");
}

TEST(Mismatch, barrier) {
  EXPECT_EQ(
      mismatch([](Runtime& runtime,
                  comm::Stream& stream) { runtime.world()->broadcast(at::zeros({4}), 1, stream); },
               [](Runtime& runtime, comm::Stream&) { runtime.world()->barrier(); }),
      "rank 2: broadcast #1 on group 'world': rank 2 called barrier(), but rank 0 called "
      "broadcast(Float, 4 elements, root 1)");
}

TEST(Mismatch, dtype_count_reduce_op_and_root) {
  const auto all_reduce = [](int64_t numel, at::ScalarType dtype, ReduceOp op) {
    return [=](Runtime& runtime, comm::Stream& stream) {
      runtime.world()->all_reduce(at::zeros({numel}, dtype), op, stream);
    };
  };
  const auto sum = all_reduce(4, at::kFloat, ReduceOp::sum());
  const std::string lead = "rank 2: all_reduce #1 on group 'world': rank 2 called all_reduce(";
  const std::string tail = "), but rank 0 called all_reduce(Float, 4 elements, sum)";
  EXPECT_EQ(mismatch(sum, all_reduce(4, at::kBFloat16, ReduceOp::sum())),
            lead + "BFloat16, 4 elements, sum" + tail);
  EXPECT_EQ(mismatch(sum, all_reduce(5, at::kFloat, ReduceOp::sum())),
            lead + "Float, 5 elements, sum" + tail);
  EXPECT_EQ(mismatch(sum, all_reduce(4, at::kFloat, ReduceOp::avg())),
            lead + "Float, 4 elements, avg" + tail);
  EXPECT_EQ(mismatch(sum, all_reduce(4, at::kFloat, ReduceOp::premul_sum(0.5))),
            lead + "Float, 4 elements, premul_sum(0.5)" + tail);
  EXPECT_EQ(mismatch(all_reduce(4, at::kFloat, ReduceOp::premul_sum(0.25)),
                     all_reduce(4, at::kFloat, ReduceOp::premul_sum(0.5))),
            lead +
                "Float, 4 elements, premul_sum(0.5)), but rank 0 called all_reduce(Float, 4 "
                "elements, premul_sum(0.25))");
  const auto broadcast = [](int root) {
    return [=](Runtime& runtime, comm::Stream& stream) {
      runtime.world()->broadcast(at::zeros({4}), root, stream);
    };
  };
  EXPECT_EQ(
      mismatch(broadcast(0), broadcast(1)),
      "rank 2: broadcast #1 on group 'world': rank 2 called broadcast(Float, 4 elements, root "
      "1), but rank 0 called broadcast(Float, 4 elements, root 0)");
}

// Gradients of one size for different modules must not be added up.
TEST(Mismatch, label) {
  const auto issue_all = [](const char* what, const std::string& label) {
    return [=](Runtime& runtime, comm::Stream& stream) {
      comm::Communicator& world = *runtime.world();
      if (what == std::string("all_gather_into")) {
        world.all_gather_into(at::zeros({12}), at::zeros({4}), stream, label);
      } else if (what == std::string("reduce_scatter")) {
        world.reduce_scatter(at::zeros({4}), at::zeros({12}), ReduceOp::avg(), stream, label);
      } else {
        world.all_reduce(at::zeros({4}), ReduceOp::avg(), stream, label);
      }
    };
  };
  for (const auto& [what, arguments] : {std::pair("all_gather_into", "(Float, 4 elements)"),
                                        std::pair("reduce_scatter", "(Float, 4 elements, avg)"),
                                        std::pair("all_reduce", "(Float, 4 elements, avg)")}) {
    const std::string call = std::string(what) + arguments;
    EXPECT_EQ(mismatch(issue_all(what, "layers.0"), issue_all(what, "layers.1")),
              std::string("rank 2: ") + what + " #1 on group 'world': rank 2 called " + call +
                  " for 'layers.1', but rank 0 called " + call + " for 'layers.0'");
    EXPECT_EQ(mismatch(issue_all(what, "layers.0"), issue_all(what, "")),
              std::string("rank 2: ") + what + " #1 on group 'world': rank 2 called " + call +
                  ", but rank 0 called " + call + " for 'layers.0'");
    EXPECT_EQ(mismatch(issue_all(what, "layers.0"), issue_all(what, "layers.0")), "(no CommError)");
  }
}

TEST(Mismatch, splits) {
  const auto all_to_all = [](std::vector<int64_t> outputs, std::vector<int64_t> inputs) {
    return [=](Runtime& runtime, comm::Stream& stream) {
      runtime.world()->all_to_all(at::zeros({3}), at::zeros({3}), outputs, inputs, stream);
    };
  };
  EXPECT_EQ(mismatch(all_to_all({1, 1, 1}, {1, 1, 1}), all_to_all({1, 1, 1}, {1, 2, 0})),
            "rank 2: all_to_all #1 on group 'world': rank 2 called all_to_all(Float, output splits "
            "[1, 1, 1], input splits [1, 2, 0]), but rank 1 called all_to_all(Float, output splits "
            "[1, 1, 1], input splits [1, 1, 1])");
}

TEST(Mismatch, transfers) {
  const auto send = [](Runtime& runtime, comm::Stream& stream) {
    if (runtime.rank() == 0) runtime.world()->send(at::zeros({4}), 2, stream);
  };
  EXPECT_EQ(mismatch(send,
                     [](Runtime& runtime, comm::Stream& stream) {
                       runtime.world()->recv(at::zeros({5}), 0, stream);
                     }),
            "rank 2: send #0 from rank 0 to rank 2 on group 'world': rank 2 called recv(Float, 5 "
            "elements), but rank 0 called send(Float, 4 elements)");
}

TEST(Mismatch, subgroups) {
  const auto subgroup = [](std::vector<int> members, std::string name) {
    return [=](Runtime& runtime, comm::Stream&) { runtime.world()->subgroup(members, name); };
  };
  EXPECT_EQ(mismatch(subgroup({0, 1, 2}, "a"), subgroup({1, 2}, "a")),
            "rank 2: subgroup #1 on group 'world': rank 2 called subgroup([1, 2], 'a'), but rank 0 "
            "called subgroup([0, 1, 2], 'a')");
  EXPECT_EQ(
      mismatch(subgroup({0, 1, 2}, "a"), subgroup({0, 1, 2}, "b")),
      "rank 2: subgroup #1 on group 'world': rank 2 called subgroup([0, 1, 2], 'b'), but rank "
      "0 called subgroup([0, 1, 2], 'a')");
}

TEST(Mismatch, names_ranks_of_a_subgroup_by_both_numbers) {
  std::string what;
  try {
    run_world(4, {}, [](Runtime& runtime) {
      const bool odd = runtime.rank() % 2 != 0;
      const auto group = runtime.world()->subgroup(
          odd ? std::vector<int>{1, 3} : std::vector<int>{0, 2}, odd ? "odd" : "even");
      group->all_reduce(at::zeros({runtime.rank() == 3 ? 2 : 1}), ReduceOp::sum(),
                        runtime.compute_stream());
    });
  } catch (const comm::CommError& e) {
    what = e.what();
  }
  EXPECT_EQ(what,
            "rank 3: all_reduce #0 on group 'odd': rank 1 (rank 3 of the world) called "
            "all_reduce(Float, 2 elements, sum), but rank 0 (rank 1 of the world) called "
            "all_reduce(Float, 1 elements, sum)");
}

/// What `look` sees, on rank 0 of a world of two, right after `issue` and again after its event.
struct Looks {
  bool early_nan;
  bool late_nan;
};

Looks look_twice(const WorldOptions& options,
                 const std::function<std::function<at::Tensor()>(Runtime&, comm::Stream&)>& issue) {
  Looks looks{};
  run_world(2, options, [&](Runtime& runtime) {
    const auto stream = runtime.create_stream("side", StreamPriority::kHigh);
    const auto look = issue(runtime, *stream);
    const bool early = look().isnan().any().item<bool>();
    runtime.compute_stream().wait(stream->record());
    const bool late = look().isnan().any().item<bool>();
    if (runtime.rank() == 0) looks = {early, late};
  });
  return looks;
}

TEST(Poison, a_copy_out_that_does_not_wait_sees_nan) {
  const std::vector<std::function<std::function<at::Tensor()>(Runtime&, comm::Stream&)>> issues = {
      [](Runtime& runtime, comm::Stream& stream) {
        const at::Tensor output = at::zeros({6});
        runtime.world()->all_gather_into(output, at::ones({3}), stream);
        return [output] { return output; };
      },
      [](Runtime& runtime, comm::Stream& stream) {
        const at::Tensor output = at::zeros({3});
        runtime.world()->reduce_scatter(output, at::ones({6}), ReduceOp::sum(), stream);
        return [output] { return output; };
      },
      [](Runtime& runtime, comm::Stream& stream) {
        const at::Tensor tensor = at::ones({3});
        runtime.world()->all_reduce(tensor, ReduceOp::sum(), stream);
        return [tensor] { return tensor; };
      },
      [](Runtime& runtime, comm::Stream& stream) {
        const at::Tensor tensor = at::ones({3});
        runtime.world()->broadcast(tensor, 1, stream);
        return [tensor] { return tensor; };
      },
      [](Runtime& runtime, comm::Stream& stream) {
        const at::Tensor output = at::zeros({4});
        runtime.world()->all_to_all(output, at::ones({4}), {}, {}, stream);
        return [output] { return output; };
      },
      [](Runtime& runtime, comm::Stream& stream) {
        const at::Tensor tensor = at::ones({3});
        if (runtime.rank() == 0) {
          runtime.world()->recv(tensor, 1, stream);
        } else {
          runtime.world()->send(tensor, 0, stream);
        }
        return [tensor] { return tensor; };
      },
  };
  for (const auto& issue : issues) {
    const Looks lazy = look_twice({.schedule = Schedule::kLazy}, issue);
    EXPECT_TRUE(lazy.early_nan);
    EXPECT_FALSE(lazy.late_nan);
    const Looks off = look_twice({.schedule = Schedule::kLazy, .poison = false}, issue);
    EXPECT_FALSE(off.early_nan);
    int seen = 0;
    for (uint64_t seed = 0; seed < 20; ++seed) {
      const Looks random = look_twice({.seed = seed, .schedule = Schedule::kRandom}, issue);
      seen += random.early_nan;
      EXPECT_FALSE(random.late_nan);
    }
    // About half of the seeds let the rank look too early.
    EXPECT_GT(seen, 2);
  }
}

TEST(Poison, spares_what_may_be_read_in_flight) {
  for (const Schedule schedule : {Schedule::kLazy, Schedule::kRandom}) {
    // The own slot of an in-place all-gather, and the inputs.
    const Looks own_slot =
        look_twice({.schedule = schedule}, [](Runtime& runtime, comm::Stream& s) {
          const at::Tensor output = at::zeros({6});
          const at::Tensor slot = output.narrow(0, 3 * runtime.rank(), 3);
          runtime.world()->all_gather_into(output, slot, s);
          return [slot] { return slot; };
        });
    EXPECT_FALSE(own_slot.early_nan);
    const Looks input = look_twice({.schedule = schedule}, [](Runtime& runtime, comm::Stream& s) {
      const at::Tensor in = at::ones({6});
      runtime.world()->reduce_scatter(at::zeros({3}), in, ReduceOp::sum(), s);
      return [in] { return in; };
    });
    EXPECT_FALSE(input.early_nan);
    const Looks root = look_twice({.schedule = schedule}, [](Runtime& runtime, comm::Stream& s) {
      const at::Tensor tensor = at::ones({3});
      runtime.world()->broadcast(tensor, 0, s);
      return [tensor] { return tensor; };
    });
    EXPECT_FALSE(root.early_nan);
  }
}

TEST(Poison, covers_the_slots_around_the_own_one) {
  run_world(3, {.schedule = Schedule::kLazy}, [](Runtime& runtime) {
    const auto stream = runtime.create_stream("side", StreamPriority::kHigh);
    const int rank = runtime.rank();
    const at::Tensor output = at::full({6}, rank + 1.0);
    runtime.world()->all_gather_into(output, output.narrow(0, 2 * rank, 2), *stream);
    for (int i = 0; i < 6; ++i) {
      EXPECT_EQ(output[i].isnan().item<bool>(), i / 2 != rank) << "element " << i;
    }
    stream->synchronize();
    for (int i = 0; i < 6; ++i) EXPECT_EQ(output[i].item<float>(), i / 2 + 1.0f);
  });
}

TEST(Poison, does_not_reach_work_queued_before_the_operation) {
  // A buffer used twice on one stream: gather, copy out, gather again.
  for (uint64_t seed = 0; seed < 30; ++seed) {
    run_world(3, {.seed = seed, .schedule = Schedule::kRandom}, [](Runtime& runtime) {
      const auto stream = runtime.create_stream("side", StreamPriority::kHigh);
      const at::Tensor buffer = at::zeros({3});
      const at::Tensor first = at::zeros({3}), second = at::zeros({3});
      const at::Tensor a = at::full({1}, runtime.rank() + 1.0), b = a.mul(10);
      runtime.world()->all_gather_into(buffer, a, *stream);
      stream->run([=] { first.copy_(buffer); });
      runtime.world()->all_gather_into(buffer, b, *stream);
      stream->run([=] { second.copy_(buffer); });
      stream->synchronize();
      EXPECT_TRUE(first.equal(at::arange(1, 4, at::kFloat)));
      EXPECT_TRUE(second.equal(at::arange(1, 4, at::kFloat).mul(10)));
    });
  }
}

TEST(Poison, reaches_another_operation_that_does_not_wait) {
  // b reads on one stream what a, on another, has not written yet.
  run_world(2, {.schedule = Schedule::kLazy}, [](Runtime& runtime) {
    const auto a = runtime.create_stream("a", StreamPriority::kHigh);
    const auto b = runtime.create_stream("b", StreamPriority::kHigh);
    const auto gate = runtime.create_stream("gate", StreamPriority::kHigh);
    const at::Tensor x = at::zeros({2}), y = at::zeros({4});
    if (runtime.rank() == 1) {
      // Holds a's operation back until b's has run.
      runtime.world()->recv(at::zeros({1}), 0, *gate);
      a->wait(gate->record());
    }
    runtime.world()->all_gather_into(x, at::ones({1}), *a);
    runtime.world()->all_gather_into(y, x, *b);
    b->synchronize();
    if (runtime.rank() == 0) {
      runtime.world()->send(at::zeros({1}), 1, *gate);
      EXPECT_TRUE(y[0].isnan().item<bool>());
    }
    a->synchronize();
    EXPECT_FALSE(x.isnan().any().item<bool>());
  });
}

}  // namespace
}  // namespace ppfsdp::sim
