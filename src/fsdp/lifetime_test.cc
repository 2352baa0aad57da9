// Modules that go before their graph or their root does, and ranks that do not do the same.
#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "src/dtensor/dtensor.h"
#include "src/fsdp/fully_shard.h"
#include "src/fsdp/testing/net.h"
#include "src/mesh/device_mesh.h"

namespace ppfsdp::fsdp {
namespace {

using testing::along;
using testing::Block;
using ::testing::HasSubstr;
using testing::kWidth;
using testing::make_sharded;
using testing::Trial;

/// An error that names the operation, and what rank 0 and what rank 1 called it for.
::testing::Matcher<std::string> names_both(const std::string& operation, const std::string& of_0,
                                           const std::string& of_1) {
  return ::testing::AllOf(HasSubstr(operation + " #"), HasSubstr("on group 'world'"),
                          HasSubstr("for '" + of_0 + "'"), HasSubstr("for '" + of_1 + "'"));
}

// The parameters that backward would read are freed memory.
TEST(Lifetime, BackwardThroughADestroyedModelIsAnError) {
  for (const ReshardAfterForward& reshard : {ReshardAfterForward(true), ReshardAfterForward()}) {
    sim::run_world(2, {}, [&](comm::Runtime& runtime) {
      at::Tensor loss;
      {
        Trial trial = make_sharded(runtime, {2, 3}, {.reshard_after_forward = reshard});
        loss = trial.loss(0);
      }
      try {
        loss.backward();
        ADD_FAILURE() << "no error";
      } catch (const c10::Error& error) {
        EXPECT_THAT(error.what_without_backtrace(), HasSubstr("has been destroyed"));
      }
    });
  }
}

// What is read outside its module's forward is a DTensor, whose operations complain, and not freed
// memory.
TEST(Lifetime, SlotsHoldShardsWhileSharded) {
  sim::run_world(2, {}, [](comm::Runtime& runtime) {
    Trial trial = make_sharded(runtime, {2, 3}, {.reshard_after_forward = true});
    trial.loss(0).backward();
    EXPECT_TRUE(trial.net->blocks[0]->w.is_same(trial.net->blocks[0]->parameters()[0]));
    EXPECT_TRUE(dtensor::is_dtensor(trial.net->blocks[0]->w));
  });
}

// A block that outlives its model, an encoder say, goes on as a root of its own.
TEST(Lifetime, ABlockOutlivesItsRoot) {
  sim::run_world(2, {}, [](comm::Runtime& runtime) {
    Block block{nullptr};
    at::Tensor x, y, old;
    {
      Trial trial = make_sharded(runtime, {2, 3}, {.reshard_after_forward = true});
      trial.loss(0).backward();
      trial.loss(0).backward();
      block = trial.net->blocks[1];
      x = trial.input(1);
      y = block(x).detach();
      old = block(x).sum();
    }
    EXPECT_THROW(old.backward(), c10::Error);
    EXPECT_TRUE(block(x).equal(y));
    const at::Tensor before = dtensor::full_tensor(block->parameters()[0].grad()).clone();
    block(x).sum().backward();
    EXPECT_FALSE(dtensor::full_tensor(block->parameters()[0].grad()).equal(before));
  });
}

class HolderImpl : public nn::Module {
 public:
  explicit HolderImpl(Block first, Block second) : first(first), second(second) {
    register_module("first", first);
    register_module("second", second);
  }
  at::Tensor forward(const at::Tensor& x) { return second(first(x)); }
  Block first, second;
};
PPFSDP_MODULE(Holder);

// A module that is taken out of the model must not be touched any more.
TEST(Lifetime, ABlockIsReplacedAfterItRan) {
  sim::run_world(2, {}, [](comm::Runtime& runtime) {
    const FullyShardOptions options{.mesh = mesh::DeviceMesh::create(runtime, {2})};
    const auto make = [&] {
      Block block(kWidth, 2);
      for (at::Tensor& param : block->parameters()) {
        torch::NoGradGuard no_grad;
        param.fill_(1);
      }
      fully_shard(*block, options);
      return block;
    };
    Holder holder(make(), make());
    fully_shard(*holder, options);
    const at::Tensor x = at::ones({2, kWidth}, at::kDouble);
    const at::Tensor y = holder(x);
    y.sum().backward();
    holder->first = make();
    holder->replace_module("first", holder->first);
    EXPECT_TRUE(holder(x).equal(y));
    holder(x).sum().backward();
    holder(x).sum().backward();
    EXPECT_TRUE(holder->parameters()[0].grad().defined());
  });
}

// Ranks that take different paths get an error that says who did what; not a hang, not a wrong
// gradient.
TEST(Lifetime, AParameterUsedOnOneRankOnlyIsAnError) {
  for (const bool in_forward : {true, false}) {
    try {
      sim::run_world(2, {}, [&](comm::Runtime& runtime) {
        Trial trial = make_sharded(runtime, {2, 2}, {.reshard_after_forward = true});
        if (runtime.rank() == 1) {
          trial.net->path = [&](testing::NetImpl& net, const at::Tensor& x) {
            at::Tensor y = net.blocks[0](x);
            return in_forward ? y : net.blocks[1](y.detach()).detach() + y;
          };
        }
        trial.loss(0).backward();
        trial.loss(1).backward();
      });
      ADD_FAILURE() << "no error";
    } catch (const comm::CommError& error) {
      EXPECT_THAT(error.what(), HasSubstr("rank 1"));
    }
  }
}

std::string error_of(const std::function<void(comm::Runtime&)>& fn) {
  try {
    sim::run_world(2, {}, fn);
  } catch (const comm::CommError& error) {
    return error.what();
  }
  return "(no CommError)";
}

// Ranks that run different blocks of one size: their gathers must not pair up.
TEST(Lifetime, RanksThatRunDifferentBlocksAreAnError) {
  EXPECT_THAT(error_of([](comm::Runtime& runtime) {
                Trial trial = make_sharded(runtime, {2, 2, 2}, {.reshard_after_forward = true});
                trial.net->path = along({runtime.rank(), 2});
                trial.loss(0);
              }),
              names_both("all_gather_into", "block0", "block1"));
}

// The same where nothing is gathered: the gradients that meet would be those of different blocks.
TEST(Lifetime, GradientsOfDifferentBlocksAreAnError) {
  EXPECT_THAT(error_of([](comm::Runtime& runtime) {
                Trial trial = make_sharded(runtime, {2, 2, 2}, {.reshard_after_forward = false});
                trial.fsdp->set_reshard_after_backward(false);
                trial.loss(0).backward();
                trial.net->path = along({runtime.rank(), 2});
                trial.loss(1).backward();
              }),
              names_both("reduce_scatter", "block0", "block1"));
}

// And within a block: one size of gradient, of different parameters.
TEST(Lifetime, GradientsOfDifferentParametersAreAnError) {
  EXPECT_THAT(error_of([](comm::Runtime& runtime) {
                Trial trial = make_sharded(runtime, {kWidth}, {.reshard_after_forward = true});
                trial.net->path = [&](testing::NetImpl& net, const at::Tensor& x) {
                  Block& block = net.blocks[0];
                  // A frozen parameter of the computation, not of the model: no gradient.
                  block->on_forward = [&block, rank = runtime.rank()] {
                    at::Tensor& unused = rank == 0 ? block->v : block->w;
                    unused = unused.detach();
                  };
                  return block(x);
                };
                trial.loss(0).backward();
              }),
              names_both("reduce_scatter", "block0: block0.w", "block0: block0.v"));
}

// As many ranks as the simulated mesh is promised to train; most hold no row of most parameters.
TEST(Lifetime, TwoHundredAndFiftySixRanks) {
  sim::run_world(256, {.schedule = sim::Schedule::kLazy, .stack_bytes = size_t{1} << 20},
                 [](comm::Runtime& runtime) {
                   Trial trial = make_sharded(runtime, {5, 3}, {.reshard_after_forward = 4});
                   for (int step = 0; step < 2; ++step) {
                     // The same batch on every rank: the average is each rank's own gradient.
                     trial.rank = 0;
                     trial.zero_grad();
                     trial.loss(0).backward();
                     trial.update();
                   }
                   for (const at::Tensor& param : trial.net->parameters()) {
                     EXPECT_TRUE(param.grad().defined());
                   }
                   EXPECT_TRUE(trial.seen[0].isfinite().all().item<bool>());
                 });
}

}  // namespace
}  // namespace ppfsdp::fsdp
