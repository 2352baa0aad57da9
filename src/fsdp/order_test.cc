// What is issued when, what waits for what, and how much is alive at once.
#include <c10/core/GradMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>

#include "src/fsdp/param_group.h"
#include "src/fsdp/state.h"
#include "src/fsdp/testing/loopback_runtime.h"
#include "src/fsdp/testing/net.h"

namespace ppfsdp::fsdp {
namespace {

using ::testing::AllOf;
using testing::along;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::LoopbackRuntime;
using testing::make_sharded;
using testing::Trial;

const std::vector<int64_t> kHidden = {5, 7, 1};

/// Elements of one of two ranks' parts: w [hidden, 3], v [3, hidden], and the root's scale [3].
int64_t part_of(int64_t hidden) { return (hidden + 1) / 2 * 3 + 2 * hidden; }
constexpr int64_t kRootPart = 2;

class Traced {
 public:
  explicit Traced(const FullyShardOptions& options, const std::vector<int64_t>& hidden = kHidden)
      : runtime(0, 2), trial(make_sharded(runtime, hidden, options)) {
    for (size_t i = 0; i < hidden.size(); ++i) {
      trial.net->blocks[i]->on_forward = [this, i, part = part_of(hidden[i]),
                                          has_own_size = hidden == kHidden] {
        runtime.note("f" + std::to_string(i));
        // Gathers are told apart by their size.
        if (has_own_size) {
          EXPECT_TRUE(runtime.gather_is_visible(part)) << "block " << i;
        }
        measure();
      };
    }
  }

  void measure() {
    int unsharded = 0;
    for (FSDPState* state : trial.fsdp->state().states_below()) {
      unsharded += state->group()->is_unsharded() ? 1 : 0;
    }
    most_unsharded = std::max(most_unsharded, unsharded);
    most_gathers = std::max(most_gathers, runtime.live_gathers());
  }

  /// Forward alone, or with backward; returns what was issued: gR, g0 (gathers), r0 (reduction),
  /// f0 (a block's computation), in the order of issue.
  std::vector<std::string> forward() {
    runtime.log.clear();
    loss = trial.loss(0);
    return take();
  }
  std::vector<std::string> backward() {
    runtime.log.clear();
    loss.backward();
    EXPECT_TRUE(runtime.reductions_are_visible());
    return take();
  }
  void update() { trial.update(); }

  std::vector<std::string> take() {
    std::vector<std::string> result;
    for (const std::string& entry : runtime.log) {
      const int64_t numel = entry[0] == 'f' ? 0 : std::stoll(entry.substr(entry.find(' ')));
      std::string name = numel == 0 ? entry : numel == kRootPart ? entry.substr(0, 1) + "R" : "";
      for (size_t i = 0; i < kHidden.size() && name.empty(); ++i) {
        if (numel == part_of(kHidden[i])) name = entry.substr(0, 1) + std::to_string(i);
      }
      // A block notes its begin and its end.
      if (result.empty() || result.back() != name) result.push_back(name);
    }
    EXPECT_THAT(runtime.faults(), IsEmpty());
    return result;
  }

  LoopbackRuntime runtime;
  Trial trial;
  at::Tensor loss;
  int most_unsharded = 0;
  int most_gathers = 0;
};

using Order = std::vector<std::string>;

// Too early a gather costs memory, too late a one time; one too many costs both.
TEST(Order, GathersAndReductionsForEveryReshardFlag) {
  const Order first = {"gR", "g0", "f0", "g1", "f1", "g2", "f2"};
  const Order prefetched = {"gR", "g0", "g1", "f0", "g2", "f1", "f2"};
  const Order reductions = {"r2", "r1", "r0", "rR"};
  for (const auto& [reshard, backward] : std::vector<std::pair<ReshardAfterForward, Order>>{
           {true, {"gR", "g2", "g1", "r2", "g0", "r1", "r0", "rR"}},
           {ReshardAfterForward(), {"g2", "g1", "r2", "g0", "r1", "r0", "rR"}},
           {false, reductions}}) {
    Traced traced({.reshard_after_forward = reshard});
    EXPECT_THAT(traced.forward(), ElementsAreArray(first));
    EXPECT_THAT(traced.backward(), ElementsAreArray(backward));
    for (int step = 0; step < 2; ++step) {
      traced.update();
      EXPECT_THAT(traced.forward(), ElementsAreArray(prefetched));
      EXPECT_THAT(traced.backward(), ElementsAreArray(backward));
    }
  }
}

// With mixed precision a stream more is at work: the casts into the gather's buffer.
TEST(Order, MixedPrecisionWaitsToo) {
  Traced traced({.reshard_after_forward = true,
                 .mp_policy = {.param_dtype = at::kFloat, .reduce_dtype = at::kDouble}});
  for (int step = 0; step < 3; ++step) {
    traced.forward();
    EXPECT_THAT(traced.backward(), ElementsAre("gR", "g2", "g1", "r2", "g0", "r1", "r0", "rR"));
    traced.update();
  }
}

// The smaller shards that forward leaves are written by the compute stream.
TEST(Order, GathersFromPartsWaitForThem) {
  LoopbackRuntime runtime(1, 4);
  Trial trial = make_sharded(runtime, kHidden, {.reshard_after_forward = 2});
  for (int step = 0; step < 2; ++step) {
    trial.loss(0).backward();
    EXPECT_THAT(runtime.faults(), IsEmpty());
    EXPECT_TRUE(runtime.reductions_are_visible());
  }
}

// What a changed path leaves in flight is waited for before its buffer goes, and gathered anew when
// it is needed.
TEST(Order, AMistakenPrefetchIsWaitedForAndDropped) {
  Traced traced({.reshard_after_forward = true});
  traced.forward();
  traced.backward();
  traced.update();
  traced.trial.net->path = along({0, 2});
  EXPECT_THAT(traced.forward(), ElementsAre("gR", "g0", "g1", "f0", "g2", "f2"));
  EXPECT_THAT(traced.backward(), ElementsAre("gR", "g2", "g0", "r2", "r0", "rR"));
  traced.update();
  traced.trial.net->path = along({0, 1, 2});
  traced.forward();
  traced.backward();
}

// No later gather's wait covers for it.
TEST(Order, AMistakenPrefetchThatIsTheLastGatherIsWaitedFor) {
  Traced traced({.reshard_after_forward = false});
  traced.forward();
  traced.backward();
  traced.update();
  traced.trial.net->path = along({0});
  EXPECT_THAT(traced.forward(), ElementsAre("gR", "g0", "g1", "f0"));
  EXPECT_THAT(traced.backward(), ElementsAre("r0", "rR"));
}

// Activation checkpointing runs blocks again inside backward. They stay unsharded for their own
// backward, and what backward prefetches is still the order of the real forward.
TEST(Order, AForwardInsideBackwardLeavesTheOrderAlone) {
  Traced traced({.reshard_after_forward = true});
  traced.trial.net->path = [&](testing::NetImpl& net, const at::Tensor& x) {
    const at::Tensor y = along({0, 1, 2})(net, x);
    y.register_hook([&](const at::Tensor&) {
      const c10::AutoGradMode as_in_forward(true);
      net.blocks[1](traced.trial.input(0));
      net.blocks[0](traced.trial.input(0));
    });
    return y;
  };
  for (int step = 0; step < 2; ++step) {
    traced.forward();
    EXPECT_THAT(traced.backward(),
                ElementsAre("gR", "g2", "g1", "f1", "g0", "f0", "r2", "r1", "r0", "rR"));
    traced.update();
  }
}

// Unsynchronised backward reduces nothing.
TEST(Order, NoReductionsWithoutSynchronisation) {
  Traced traced({.reshard_after_forward = true});
  traced.trial.fsdp->set_requires_gradient_sync(false);
  traced.forward();
  EXPECT_THAT(traced.backward(), ElementsAre("gR", "g2", "g1", "g0"));
  traced.trial.fsdp->set_requires_gradient_sync(true);
  traced.forward();
  EXPECT_THAT(traced.backward(), ElementsAre("gR", "g2", "g1", "r2", "g0", "r1", "r0", "rR"));
}

// Whichever module is told, before the first forward and later: what is pending is waited for at
// the end of the last backward only.
TEST(Order, AnyModuleSaysWhichBackwardIsTheLast) {
  for (const bool before_the_first_forward : {true, false}) {
    Traced traced({.reshard_after_forward = true});
    auto& blocks = traced.trial.net->blocks;
    if (!before_the_first_forward) traced.trial.loss(0).backward();
    fsdp_module(*blocks[1]).set_is_last_backward(false);
    traced.trial.loss(0).backward();
    EXPECT_FALSE(traced.runtime.reductions_are_visible());
    fsdp_module(*blocks[2]).set_is_last_backward(true);
    traced.trial.loss(0).backward();
    EXPECT_TRUE(traced.runtime.reductions_are_visible());
    EXPECT_THAT(traced.runtime.faults(), IsEmpty());
  }
}

// The failed forward is over: a block by itself must wait for what the optimizer wrote since.
TEST(Order, ABlockAloneAfterAFailedForwardWaitsForTheOptimizer) {
  Traced traced({.reshard_after_forward = true});
  traced.forward();
  traced.backward();
  traced.trial.net->path = [](testing::NetImpl& net, const at::Tensor& x) -> at::Tensor {
    net.blocks[0](x);
    throw std::runtime_error("interrupted");
  };
  EXPECT_THROW(traced.forward(), std::runtime_error);
  traced.update();
  traced.trial.net->blocks[1](traced.trial.input(1));
  // The interrupted forward's prefetch of block 1, whose result nobody takes.
  EXPECT_THAT(traced.runtime.faults(), ElementsAre(AllOf(HasSubstr("compute writes"),
                                                         HasSubstr("still read by all_gather"))));
}

// Forward with resharding holds the root, one block, and what is gathered for the next: however
// deep the model is.
TEST(Order, FewParametersAreUnshardedAtOnce) {
  for (const int64_t blocks : {4, 16}) {
    Traced traced({.reshard_after_forward = true}, std::vector<int64_t>(blocks, 2));
    for (int step = 0; step < 2; ++step) {
      traced.loss = traced.trial.loss(0);
      traced.loss.backward();
      traced.update();
    }
    EXPECT_EQ(traced.most_unsharded, 2);  // the root and a block
    EXPECT_EQ(traced.most_gathers, 1);
  }
}

}  // namespace
}  // namespace ppfsdp::fsdp
