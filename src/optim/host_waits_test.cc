// A whole training step of a sharded model, on tensors without values: reading one is an error
// there, and every wait of the host for a stream is counted. What runs so never holds up a GPU.
#include <ATen/ops/empty.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "src/fsdp/fully_shard.h"
#include "src/fsdp/testing/loopback_runtime.h"
#include "src/fsdp/testing/net.h"
#include "src/optim/adamw.h"
#include "src/optim/clip_grad_norm.h"
#include "src/optim/sgd.h"

namespace ppfsdp::optim {
namespace {

using fsdp::testing::LoopbackRuntime;
using ::testing::IsEmpty;

using fsdp::testing::make_sharded;
using fsdp::testing::Trial;

void expect_no_waits(
    const fsdp::FullyShardOptions& options,
    const std::function<std::unique_ptr<Optimizer>(std::vector<at::Tensor>)>& make) {
  LoopbackRuntime runtime(1, 2);
  Trial trial = make_sharded(runtime, {5, 7, 1}, options);
  const auto optimizer = make(trial.net->parameters());
  for (int step = 0; step < 3; ++step) {
    optimizer->zero_grad();
    for (int micro = 0; micro < 2; ++micro) {
      trial.fsdp->set_requires_gradient_sync(micro == 1);
      trial.loss(micro).backward();
    }
    clip_grad_norm_(optimizer->parameters(), 1.0);
    optimizer->step();
  }
  EXPECT_EQ(runtime.host_waits, 0);
  EXPECT_THAT(runtime.faults(), IsEmpty());
  // Of three blocks and the root, in each step.
  EXPECT_EQ(std::count_if(runtime.log.begin(), runtime.log.end(),
                          [](const std::string& entry) { return entry.starts_with("reduce"); }),
            12);
}

TEST(HostWaits, AStepHasNone) {
  for (const auto implementation : {Implementation::kForeach, Implementation::kSingleTensor}) {
    for (const bool casts : {false, true}) {
      fsdp::FullyShardOptions options;
      if (casts) options.mp_policy = {.param_dtype = at::kFloat, .reduce_dtype = at::kDouble};
      expect_no_waits(options, [&](std::vector<at::Tensor> parameters) {
        return std::make_unique<AdamW>(std::move(parameters),
                                       AdamWOptions{.implementation = implementation});
      });
      expect_no_waits(options, [&](std::vector<at::Tensor> parameters) {
        return std::make_unique<SGD>(std::move(parameters),
                                     SGDOptions{.momentum = 0.9, .implementation = implementation});
      });
    }
  }
}

// Or the count of none would say nothing.
TEST(HostWaits, ReadingAValueIsAnError) {
  EXPECT_ANY_THROW(at::empty({}, at::TensorOptions(at::kMeta)).item<double>());
}

}  // namespace
}  // namespace ppfsdp::optim
