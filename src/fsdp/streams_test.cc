// What a device would do with memory and streams if the host ran ahead of it: nothing is read
// before it is written, and no memory is given out again while it is in use (StreamMemory).
#include <ATen/ThreadLocalState.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "src/dtensor/dtensor.h"
#include "src/fsdp/fully_shard.h"
#include "src/fsdp/testing/loopback_runtime.h"
#include "src/fsdp/testing/net.h"
#include "src/nn/to_empty.h"

namespace ppfsdp::fsdp {
namespace {

using testing::along;
using testing::Block;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using testing::kWidth;
using testing::LoopbackRuntime;
using testing::make_sharded;
using testing::NetImpl;
using testing::Trial;

/// All that the compute stream's pool has may be written now.
void write_compute_memory() { at::empty({1}, at::TensorOptions(at::kMeta)).fill_(0); }

/// Runs `scenario` with every kind of buffer that a group has.
void expect_no_faults(const std::function<void(Trial&)>& scenario) {
  const MixedPrecisionPolicy policies[] = {
      {},
      {.param_dtype = at::kFloat, .reduce_dtype = at::kDouble},
      {.param_dtype = at::kFloat, .reduce_dtype = at::kHalf},
  };
  for (const int world : {1, 2, 4}) {
    std::vector<ReshardAfterForward> reshards = {ReshardAfterForward(), true, false};
    if (world == 4) reshards.emplace_back(2);
    for (const MixedPrecisionPolicy& policy : policies) {
      for (const ReshardAfterForward& reshard : reshards) {
        for (const bool group_memory : {false, true}) {
          SCOPED_TRACE("world " + std::to_string(world) + ", casts " +
                       std::to_string(policy.param_dtype.has_value()) + ", reshard " +
                       std::to_string(reshard.index()) + ", group memory " +
                       std::to_string(group_memory));
          LoopbackRuntime runtime(world - 1, world);
          {
            Trial trial = make_sharded(runtime, {5, 7, 1},
                                       {.reshard_after_forward = reshard, .mp_policy = policy});
            for (Block& block : trial.net->blocks) {
              fsdp_module(*block).set_allocate_memory_from_process_group_for_comm(group_memory);
            }
            scenario(trial);
            write_compute_memory();
          }
          write_compute_memory();
          ASSERT_THAT(runtime.faults(), IsEmpty());
          // Or what is on trial was never there.
          ASSERT_TRUE(world == 1 || !runtime.log.empty());
        }
      }
    }
  }
}

// Gradients are dropped while the optimizer still reads them.
TEST(Streams, Steps) {
  expect_no_faults([](Trial& trial) {
    for (int step = 0; step < 3; ++step) {
      trial.zero_grad();
      trial.loss(0).backward();
      trial.update();
    }
  });
}

// What is reduced is added to the gradient on a side stream, and dropped at once.
TEST(Streams, GradientsThatAddUp) {
  expect_no_faults([](Trial& trial) {
    for (int step = 0; step < 2; ++step) {
      trial.zero_grad();
      for (int micro = 0; micro < 3; ++micro) trial.loss(micro).backward();
      trial.update();
    }
  });
}

TEST(Streams, GradientsThatAddUpUnsharded) {
  expect_no_faults([](Trial& trial) {
    for (int step = 0; step < 2; ++step) {
      trial.zero_grad();
      for (int micro = 0; micro < 3; ++micro) {
        trial.fsdp->set_requires_gradient_sync(micro == 2);
        trial.loss(micro).backward();
      }
      trial.update();
    }
  });
}

// A backward that is not the last leaves its reduction in flight, and the caller drops the
// gradients, which may be of the caller's making, before it is done.
TEST(Streams, GradientsDroppedWhileTheyAreReduced) {
  expect_no_faults([](Trial& trial) {
    trial.fsdp->set_is_last_backward(false);
    for (int step = 0; step < 2; ++step) {
      for (at::Tensor& param : trial.net->parameters()) {
        param.mutable_grad() = at::zeros_like(param);
      }
      trial.loss(0).backward();
      trial.zero_grad();
      write_compute_memory();
    }
  });
}

// A block that runs no more leaves what was gathered for it in flight.
TEST(Streams, MistakenPrefetches) {
  expect_no_faults([](Trial& trial) {
    trial.loss(0).backward();
    trial.update();
    for (const std::vector<int>& path : {std::vector<int>{0}, {0, 2}, {1}}) {
      trial.net->path = along(path);
      trial.loss(0).backward();
      trial.update();
    }
    const c10::NoGradGuard no_grad;
    trial.net->path = along({0, 1, 2});
    trial.loss(0);
    trial.net->path = along({0});
    trial.loss(0);
    trial.update();
  });
}

TEST(Streams, FailuresOfForwardAndBackward) {
  expect_no_faults([](Trial& trial) {
    trial.loss(0).backward();
    trial.update();
    const NetImpl::Path whole = trial.net->path;
    const NetImpl::Path interrupted = [](NetImpl& net, const at::Tensor& x) -> at::Tensor {
      net.blocks[0](x);
      throw std::runtime_error("interrupted");
    };
    trial.net->path = interrupted;
    EXPECT_THROW(trial.loss(0), std::runtime_error);
    trial.net->path = [](NetImpl& net, at::Tensor x) {
      x = net.blocks[0](x);
      x.register_hook([](const at::Tensor&) { throw std::runtime_error("interrupted"); });
      return net.blocks[2](net.blocks[1](x));
    };
    EXPECT_THROW(trial.loss(0).backward(), std::runtime_error);
    trial.net->path = whole;
    trial.loss(0).backward();
    // The model goes with a prefetch in flight.
    trial.net->path = interrupted;
    EXPECT_THROW(trial.loss(0), std::runtime_error);
  });
}

TEST(Streams, ParametersGatheredAndFreedByHand) {
  expect_no_faults([](Trial& trial) {
    for (int step = 0; step < 2; ++step) {
      for (Block& block : trial.net->blocks) fsdp_module(*block).unshard();
      trial.fsdp->unshard();
      fsdp_module(*trial.net->blocks[1]).reshard();
      write_compute_memory();
      trial.loss(0).backward();
      trial.update();
    }
  });
}

// New memory under the parameters, with a gather of the old one in flight.
TEST(Streams, ReplacedParameters) {
  expect_no_faults([](Trial& trial) {
    const auto prefetch_in_vain = [&] {
      const c10::NoGradGuard no_grad;
      trial.net->path = along({0, 1, 2});
      trial.loss(0);
      trial.net->path = [](NetImpl& net, const at::Tensor& x) -> at::Tensor {
        net.blocks[0](x);
        throw std::runtime_error("interrupted");
      };
      EXPECT_THROW(trial.loss(0), std::runtime_error);
    };
    prefetch_in_vain();
    for (at::Tensor& param : trial.net->parameters()) {
      const c10::NoGradGuard no_grad;
      param.set_data(param.clone());
    }
    trial.net->path = along({0, 1, 2});
    trial.loss(0).backward();
    prefetch_in_vain();
    nn::to_empty(*trial.net, at::kMeta);
    write_compute_memory();
    trial.net->path = along({0, 1, 2});
    trial.loss(0).backward();
  });
}

// The blocks' streams go with their root.
TEST(Streams, ABlockOutlivesItsRoot) {
  for (const bool casts : {false, true}) {
    LoopbackRuntime runtime(0, 2);
    Block block{nullptr};
    at::Tensor x;
    {
      Trial trial = make_sharded(
          runtime, {5, 7, 1},
          {.reshard_after_forward = true,
           .mp_policy = {.param_dtype = casts ? std::optional(at::kFloat) : std::nullopt}});
      trial.loss(0).backward();
      trial.net->path = [](NetImpl& net, const at::Tensor& x) -> at::Tensor {
        net.blocks[0](x);  // and gathers block 1
        throw std::runtime_error("interrupted");
      };
      EXPECT_THROW(trial.loss(0), std::runtime_error);
      block = trial.net->blocks[1];
      x = trial.input(1);
    }
    write_compute_memory();
    block(x).sum().backward();
    write_compute_memory();
    EXPECT_THAT(runtime.faults(), IsEmpty());
  }
}

// Which of the buffers are the communicator's, and that it is the module's own choice.
TEST(Streams, GroupMemoryIsAskedForTheModulesOwnBuffers) {
  constexpr int64_t kPart = 9 + 10;  // of w [5, 3] and v [3, 5] over two ranks
  LoopbackRuntime runtime(0, 2);
  Trial trial = make_sharded(runtime, {5}, {.reshard_after_forward = true});
  trial.loss(0).backward();
  EXPECT_THAT(runtime.allocations, IsEmpty());
  trial.fsdp->set_allocate_memory_from_process_group_for_comm(true);
  fsdp_module(*trial.net->blocks[0]).set_allocate_memory_from_process_group_for_comm(true);
  trial.fsdp->set_allocate_memory_from_process_group_for_comm(false);
  const auto n = [](int64_t numel, const std::string& stream) {
    return std::to_string(numel) + " of " + stream;
  };
  trial.loss(0).backward();
  EXPECT_THAT(runtime.allocations,
              ElementsAre(n(2 * kPart, "all_gather_copy_in"), n(2 * kPart, "all_gather_copy_in"),
                          n(2 * kPart, "compute"), n(kPart, "reduce_scatter")));
}

// Where memory comes from changes no bit.
TEST(Streams, GroupMemoryChangesNoValue) {
  for (const ReshardAfterForward& reshard :
       {ReshardAfterForward(true), ReshardAfterForward(false), ReshardAfterForward(2)}) {
    for (const auto param_dtype : {std::optional<at::ScalarType>(), std::optional(at::kFloat)}) {
      sim::run_world(4, {.schedule = sim::Schedule::kLazy}, [&](comm::Runtime& runtime) {
        std::vector<at::Tensor> results[2];
        for (const bool group_memory : {false, true}) {
          Trial trial = make_sharded(
              runtime, {5, 7},
              {.reshard_after_forward = reshard, .mp_policy = {.param_dtype = param_dtype}});
          trial.fsdp->set_allocate_memory_from_process_group_for_comm(group_memory);
          for (Block& block : trial.net->blocks) {
            fsdp_module(*block).set_allocate_memory_from_process_group_for_comm(group_memory);
          }
          for (int step = 0; step < 3; ++step) {
            trial.loss(step).backward();
            trial.update();
          }
          const c10::NoGradGuard no_grad;
          for (const at::Tensor& param : trial.net->parameters()) {
            results[group_memory].push_back(dtensor::full_tensor(param).clone());
            results[group_memory].push_back(dtensor::full_tensor(param.grad()).clone());
          }
        }
        ASSERT_EQ(results[0].size(), 10U);
        for (size_t i = 0; i < results[0].size(); ++i) {
          EXPECT_TRUE(at::equal(results[0][i], results[1][i])) << i;
        }
      });
    }
  }
}

// On a GPU, LibTorch runs backward's hooks on a thread of its own, with the caller's thread-local
// state (dispatch keys, grad mode), while the caller waits: nothing of ours may be tied to the
// thread. Likewise when the caller's backward runs on another thread than its forward.
TEST(Streams, BackwardOnAnotherThread) {
  for (const ReshardAfterForward& reshard : {ReshardAfterForward(true), ReshardAfterForward(2)}) {
    std::vector<at::Tensor> want;
    for (const std::string where : {"here", "engine's thread", "caller's thread"}) {
      SCOPED_TRACE(where);
      LoopbackRuntime runtime(1, 4, at::kCPU);
      Trial trial = make_sharded(runtime, {5, 7, 1}, {.reshard_after_forward = reshard});
      std::vector<at::Tensor> got;
      for (int step = 0; step < 3; ++step) {
        const at::Tensor loss = trial.loss(step);
        if (where == "here") {
          loss.backward();
        } else {
          const at::ThreadLocalState state;
          std::thread([&] {
            std::optional<at::ThreadLocalStateGuard> as_the_engine_does;
            if (where == "engine's thread") as_the_engine_does.emplace(state);
            loss.backward();
          }).join();
        }
        for (const at::Tensor& param : trial.net->parameters()) {
          ASSERT_TRUE(param.grad().defined());
          got.push_back(dtensor::local_of(param.grad()).clone());
          EXPECT_FALSE(got.back().requires_grad());
        }
        trial.update();
      }
      if (want.empty()) want = got;
      ASSERT_EQ(got.size(), want.size());
      for (size_t i = 0; i < want.size(); ++i) EXPECT_TRUE(at::equal(got[i], want[i])) << i;
    }
  }
}

}  // namespace
}  // namespace ppfsdp::fsdp
