// Ways of using a model that plain training allows: sharded training must give the same results.
#include <ATen/ops/stack.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <stdexcept>

#include "src/dtensor/dtensor.h"
#include "src/fsdp/fully_shard.h"
#include "src/fsdp/testing/net.h"

namespace ppfsdp::fsdp {
namespace {

using testing::along;
using testing::Block;
using testing::expect_as_plain;
using testing::NetImpl;
using testing::Trial;

void step(Trial& trial, int k) {
  trial.zero_grad();
  trial.loss(k).backward();
  trial.update();
}

// The second use of a block gathers again what the first freed, and each use's gradients count.
TEST(Scenario, ABlockUsedSeveralTimesInOneForward) {
  expect_as_plain([](Trial& trial) {
    trial.net->path = along({0, 1, 0, 2, 2, 0});
    step(trial, 0);
    trial.loss(1).backward();
  });
}

// Each forward's hooks stand beside the other's.
TEST(Scenario, SeveralForwardsBeforeOneBackward) {
  expect_as_plain([](Trial& trial) {
    for (int k = 0; k < 2; ++k) {
      trial.zero_grad();
      (trial.loss(0) + trial.loss(1) + trial.loss(2)).backward();
      trial.update();
    }
  });
}

// The end of the first backward must not forget what the second needs.
TEST(Scenario, TwoForwardsThenTwoBackwards) {
  expect_as_plain([](Trial& trial) {
    for (int k = 0; k < 2; ++k) {
      trial.zero_grad();
      const at::Tensor first = trial.loss(0);
      const at::Tensor second = trial.loss(1);
      first.backward();
      second.backward();
      trial.update();
    }
  });
}

TEST(Scenario, BackwardTwiceThroughOneGraph) {
  expect_as_plain([](Trial& trial) {
    const at::Tensor loss = trial.loss(0);
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
  });
}

// Forwards without gradients leave parameters unsharded or prefetched, which must not go stale.
TEST(Scenario, EvaluationBetweenSteps) {
  expect_as_plain([](Trial& trial) {
    const auto evaluate = [&trial] {
      const c10::NoGradGuard no_grad;
      trial.loss(7);
    };
    evaluate();
    step(trial, 0);
    evaluate();
    step(trial, 1);
    evaluate();
    trial.update();
    evaluate();
    trial.loss(2).backward();
  });
}

// What inference mode makes must not be what training uses later.
TEST(Scenario, InferenceModeBeforeAndBetweenSteps) {
  expect_as_plain([](Trial& trial) {
    const auto infer = [&trial] {
      const c10::InferenceMode inference;
      const at::Tensor y = trial.net(trial.input(7));
      trial.seen.push_back(y.sum());
    };
    infer();
    step(trial, 0);
    infer();
    trial.loss(1).backward();
  });
}

// A block that runs by itself is the outermost forward for that time.
TEST(Scenario, ABlockRunsAloneBetweenSteps) {
  expect_as_plain([](Trial& trial) {
    step(trial, 0);
    (trial.net->blocks[1](trial.input(1)).sum() * 840).backward();
    trial.update();
    {
      const c10::NoGradGuard no_grad;
      trial.seen.push_back(trial.net->blocks[2](trial.input(2)));
    }
    step(trial, 1);
    (trial.net->blocks[0](trial.input(1)).sum() * 840).backward();
  });
}

// What nobody uses gets no gradient, and what was used otherwise is not disturbed by it.
TEST(Scenario, BlocksThatDoNotRunOrWhoseOutputIsNotUsed) {
  expect_as_plain([](Trial& trial) {
    trial.net->path = along({0, 2});
    step(trial, 0);
    trial.net->path = [](NetImpl& net, const at::Tensor& x) {
      net.blocks[1](x);
      return net.blocks[2](net.blocks[0](x).detach());
    };
    step(trial, 1);
    trial.net->path = along({0, 1, 2});
    trial.loss(2).backward();
  });
}

// A model that takes another way each step gets no prefetch, or one that nobody uses.
TEST(Scenario, TheOrderChangesEachStep) {
  expect_as_plain([](Trial& trial) {
    const std::vector<std::vector<int>> paths = {{0, 1, 2}, {0, 1, 2}, {2, 1, 0}, {0, 2},
                                                 {1, 1},    {0, 1, 2}, {1},       {2, 0, 1, 2}};
    for (size_t k = 0; k < paths.size(); ++k) {
      trial.net->path = along(paths[k]);
      step(trial, static_cast<int>(k));
    }
    trial.net->path = along({0, 1, 2});
    trial.loss(0).backward();
  });
}

// A gather that was issued for a block which then did not run is of the old values after the step.
TEST(Scenario, APrefetchThatNobodyUsedIsNotUsedLater) {
  expect_as_plain([](Trial& trial) {
    const c10::NoGradGuard no_grad;
    trial.net->path = along({0, 1, 2});
    trial.loss(0);
    trial.net->path = along({0, 2});
    trial.loss(0);
    trial.update();
    if (trial.fsdp.has_value()) {
      FSDPModule block = fsdp_module(*trial.net->blocks[1]);
      block.unshard();
    }
    trial.seen.push_back(trial.net->blocks[1]->w.clone() * 1);
    if (trial.fsdp.has_value()) {
      fsdp_module(*trial.net->blocks[1]).reshard();
    }
  });
}

// The gradient of the input is the plain model's.
TEST(Scenario, AnInputThatRequiresGrad) {
  expect_as_plain([](Trial& trial) {
    const at::Tensor x = trial.input(0).requires_grad_();
    (trial.net(x).sum() * 840).backward();
    trial.seen.push_back(x.grad());
  });
}

struct Interrupted : std::runtime_error {
  Interrupted() : std::runtime_error("interrupted") {}
};

// After an exception in forward the next step must start from a clean state.
TEST(Scenario, AnExceptionInForwardThenACleanStep) {
  expect_as_plain([](Trial& trial) {
    step(trial, 0);
    for (int where = 0; where < 4; ++where) {
      // Inside a block before its computation, behind it, between blocks, and in the last block.
      int calls = 0;
      const int stop = std::vector<int>{1, 2, 3, 6}[where];
      for (Block& block : trial.net->blocks) {
        block->on_forward = [&calls, stop] {
          if (++calls == stop) throw Interrupted();
        };
      }
      EXPECT_THROW(trial.net(trial.input(5)), Interrupted);
      for (Block& block : trial.net->blocks) {
        block->on_forward = [] {};
      }
      trial.update();
      step(trial, where);
    }
    trial.loss(1).backward();
  });
}

TEST(Scenario, AnExceptionInTheRootsForwardThenABlockAlone) {
  expect_as_plain([](Trial& trial) {
    step(trial, 0);
    trial.net->path = [](NetImpl& net, const at::Tensor& x) -> at::Tensor {
      net.blocks[0](x);
      throw Interrupted();
    };
    EXPECT_THROW(trial.net(trial.input(5)), Interrupted);
    trial.update();
    trial.net->path = along({0, 1, 2});
    (trial.net->blocks[0](trial.input(1)).sum() * 840).backward();
    step(trial, 1);
    trial.loss(2).backward();
  });
}

// Gradients of a backward that was cut short must not enter the next step's.
TEST(Scenario, AnExceptionInBackwardThenACleanStep) {
  expect_as_plain([](Trial& trial) {
    step(trial, 0);
    for (int where = 0; where < 3; ++where) {
      trial.net->path = [where](NetImpl& net, at::Tensor x) {
        for (int i = 0; i < 3; ++i) {
          x = net.blocks[i](x);
          if (i == where) {
            x.register_hook([](const at::Tensor&) { throw Interrupted(); });
          }
        }
        return x;
      };
      EXPECT_ANY_THROW(trial.loss(5).backward());
      trial.seen.pop_back();
      trial.zero_grad();
      trial.update();
      trial.net->path = along({0, 1, 2});
      step(trial, where);
    }
    trial.loss(1).backward();
  });
}

// Inside a block: its weights' gradients are there already when the exception comes.
TEST(Scenario, AnExceptionInTheMiddleOfABlocksBackward) {
  expect_as_plain([](Trial& trial) {
    step(trial, 0);
    trial.net->path = [](NetImpl& net, at::Tensor x) {
      x = net.blocks[0](x);
      x = net.blocks[1](x * 1);
      return x;
    };
    bool thrown = false;
    // v's gradient is complete, w's is not.
    trial.net->blocks[1]->on_forward = [&trial, &thrown] {
      if (!thrown) {
        trial.net->blocks[1]->w.register_hook([&thrown](const at::Tensor& grad) {
          if (!thrown) {
            thrown = true;
            throw Interrupted();
          }
          return grad;
        });
      }
    };
    EXPECT_ANY_THROW(trial.loss(5).backward());
    trial.net->blocks[1]->on_forward = [] {};
    EXPECT_TRUE(thrown);
    trial.zero_grad();
    step(trial, 1);
    trial.loss(2).backward();
  });
}

TEST(Scenario, ParametersFreezeAndThaw) {
  expect_as_plain([](Trial& trial) {
    const auto set = [&trial](int mask) {
      int bit = 0;
      for (at::Tensor& param : trial.net->parameters()) {
        param.set_requires_grad((mask >> bit++ & 1) != 0);
      }
    };
    for (const int mask : {0b1111111, 0b1010101, 0b0101011, 0b0000111, 0b1111000, 0b1111111}) {
      set(mask);
      step(trial, mask % 5);
    }
    set(0b0110110);
    trial.zero_grad();
    trial.loss(0).backward();
  });
}

/// Runs a block without keeping its graph, and again in backward: reentrant checkpointing.
struct Checkpoint : torch::autograd::Function<Checkpoint> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            Block* block) {
    context->saved_data["block"] = reinterpret_cast<int64_t>(block);
    context->save_for_backward({x});
    return (*block)(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    auto* block = reinterpret_cast<Block*>(context->saved_data["block"].toInt());
    const c10::AutoGradMode grad(true);
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    torch::autograd::backward({(*block)(x)}, {grads[0]});
    return {x.grad(), at::Tensor()};
  }
};

// A forward inside backward must not be taken for a new step.
TEST(Scenario, RecomputationInsideBackward) {
  expect_as_plain([](Trial& trial) {
    trial.net->path = [](NetImpl& net, at::Tensor x) {
      x = net.blocks[0](x);
      x = Checkpoint::apply(x, &net.blocks[1]);
      x = net.blocks[2](x);
      x = Checkpoint::apply(x, &net.blocks[0]);
      return Checkpoint::apply(x, &net.blocks[1]);
    };
    step(trial, 0);
    step(trial, 1);
    trial.loss(2).backward();
  });
}

void set_sync(Trial& trial, bool sync) {
  if (trial.fsdp.has_value()) trial.fsdp->set_requires_gradient_sync(sync);
}
void set_last(Trial& trial, bool last) {
  if (trial.fsdp.has_value()) trial.fsdp->set_is_last_backward(last);
}

// A block that only an unsynchronised microbatch used is reduced with the last one's.
TEST(Scenario, AccumulationWithoutSynchronisation) {
  expect_as_plain([](Trial& trial) {
    for (int k = 0; k < 2; ++k) {
      trial.zero_grad();
      set_sync(trial, false);
      trial.loss(0).backward();
      trial.net->path = along({1, 0});
      trial.loss(1).backward();
      set_sync(trial, true);
      trial.net->path = along({0});
      trial.loss(2).backward();
      trial.net->path = along({0, 1, 2});
      trial.update();
    }
  });
}

TEST(Scenario, AccumulationWithLastBackwardFlag) {
  for (const bool reshard_after_backward : {true, false}) {
    expect_as_plain([reshard_after_backward](Trial& trial) {
      if (trial.fsdp.has_value()) trial.fsdp->set_reshard_after_backward(reshard_after_backward);
      for (int k = 0; k < 3; ++k) {
        trial.zero_grad();
        for (int micro = 0; micro < 3; ++micro) {
          set_last(trial, micro == 2);
          set_sync(trial, k == 1 || micro == 2);
          trial.loss(micro + k).backward();
        }
        trial.update();
      }
      set_last(trial, true);
      trial.zero_grad();
      const at::Tensor a = trial.loss(0);
      const at::Tensor b = trial.loss(1);
      set_last(trial, false);
      b.backward();
      set_last(trial, true);
      a.backward();
    });
  }
}

TEST(Scenario, GradientsThatAreZeroedInPlace) {
  expect_as_plain([](Trial& trial) {
    for (int k = 0; k < 3; ++k) {
      trial.loss(k).backward();
      trial.update();
      for (at::Tensor& param : trial.net->parameters()) {
        param.mutable_grad().zero_();
      }
    }
    trial.loss(3).backward();
  });
}

// By hand, before the first forward and between steps, with changes between gather and use.
TEST(Scenario, UnshardAndReshardByHand) {
  expect_as_plain([](Trial& trial) {
    const auto each = [&trial](auto f) {
      if (!trial.fsdp.has_value()) return;
      f(*trial.fsdp);
      for (Block& block : trial.net->blocks) {
        FSDPModule handle = fsdp_module(*block);
        f(handle);
      }
    };
    each([](FSDPModule& module) { module.reshard(); });
    each([](FSDPModule& module) { module.unshard(); });
    trial.update();
    step(trial, 0);
    each([](FSDPModule& module) { module.unshard(); });
    step(trial, 1);
    each([](FSDPModule& module) { module.unshard(); });
    trial.update();
    each([](FSDPModule& module) { module.unshard(); });
    trial.seen.push_back(trial.net->scale.detach().clone());
    each([](FSDPModule& module) { module.reshard(); });
    trial.loss(2).backward();
  });
}

// Values that come by set_data or copy_ are the next forward's.
TEST(Scenario, ParametersThatAreReplacedOrOverwritten) {
  expect_as_plain([](Trial& trial) {
    step(trial, 0);
    {
      const c10::NoGradGuard no_grad;
      for (at::Tensor& param : trial.net->parameters()) {
        param.set_data(param.detach() + 1);
      }
    }
    step(trial, 1);
    {
      const c10::NoGradGuard no_grad;
      for (at::Tensor& param : trial.net->parameters()) {
        param.set_data(param.detach().clone());
        param.copy_(param.detach() - 1);
      }
    }
    step(trial, 2);
    trial.loss(3).backward();
  });
}

TEST(Scenario, TheModelChangesItsDtype) {
  expect_as_plain([](Trial& trial) {
    step(trial, 0);
    trial.update();  // small again: fp32 must hold the results
    trial.net->to(at::kFloat);
    trial.zero_grad();
    (trial.net(trial.input(1).to(at::kFloat)).sum() * 840).backward();
    trial.update();
    trial.net->to(at::kDouble);
    step(trial, 2);
    trial.loss(0).backward();
  });
}

// Several groups have the same size: a gather or gradient of another block would fit.
TEST(Scenario, SixtyFourBlocks) {
  expect_as_plain(
      [](Trial& trial) {
        // Sums keep values small through all the blocks.
        trial.net->path = [](NetImpl& net, const at::Tensor& x) {
          std::vector<at::Tensor> ys;
          for (Block& block : net.blocks) {
            ys.push_back(block(x));
          }
          return at::stack(ys).sum(0);
        };
        step(trial, 0);
        trial.loss(1).backward();
      },
      {.hidden = std::vector<int64_t>(64, 2), .worlds = {2, 3}});
}

}  // namespace
}  // namespace ppfsdp::fsdp
