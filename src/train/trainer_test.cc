#include "src/train/trainer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>

#include <csignal>

#include "sim/mesh/world.h"
#include "src/comm/single_runtime.h"
#include "src/dtensor/dtensor.h"
#include "src/fsdp/testing/loopback_runtime.h"
#include "src/train/recipe.h"
#include "src/train/test_util.h"

namespace ppfsdp::train {
namespace {

class TrainerTest : public FolderTest {
 protected:
  Config config(int64_t ranks) const {
    Config config;
    config.model.dim = 12;
    config.model.layers = 2;
    config.model.heads = 2;
    config.model.kv_heads = 1;
    config.model.hidden = 20;
    config.data.files = {write_text()};
    config.data.seq_len = 6;
    config.training.global_batch = 24;
    config.training.steps = 4;
    config.parallelism.ranks = ranks;
    return config;
  }

  struct Outcome {
    std::vector<StepResult> steps;
    std::vector<at::Tensor> parameters;
  };

  /// What rank 0 saw.
  static Outcome train_config(const Config& config, const TrainOptions& options = {}) {
    const DataLoader data(config, 256);
    Outcome outcome;
    const auto run = [&](comm::Runtime& runtime) {
      Trainer trainer(config, data, runtime);
      TrainOptions mine = options;
      if (runtime.rank() == 0) {
        mine.on_step = [&](const StepResult& step) {
          outcome.steps.push_back(step);
          if (options.on_step) options.on_step(step);
        };
      }
      train(trainer, config.training.steps, mine);
      const at::NoGradGuard no_grad;
      for (const at::Tensor& parameter : trainer.model()->parameters()) {
        const at::Tensor whole =
            dtensor::is_dtensor(parameter) ? dtensor::full_tensor(parameter) : parameter.detach();
        if (runtime.rank() == 0) outcome.parameters.push_back(whole);
      }
    };
    if (config.communication.backend == "single") {
      run(*comm::make_single_runtime());
    } else {
      sim::run_world(static_cast<int>(config.parallelism.ranks), {}, run);
    }
    return outcome;
  }
};

// A world of one has no other order to add in: sharded and plain training must have equal bits.
TEST_F(TrainerTest, world_of_one_equals_plain_training) {
  for (const int64_t microbatches : {1, 3}) {
    Config sharded = config(1);
    sharded.training.microbatches = microbatches;
    Config plain = sharded;
    plain.communication.backend = "single";
    const Outcome a = train_config(sharded), b = train_config(plain);
    ASSERT_EQ(a.steps.size(), 4u);
    for (size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(a.steps[i].loss, b.steps[i].loss);
      EXPECT_EQ(a.steps[i].grad_norm, b.steps[i].grad_norm);
    }
    for (size_t i = 0; i < a.parameters.size(); ++i) {
      EXPECT_TRUE(at::equal(a.parameters[i], b.parameters[i])) << i;
    }
  }
}

// Other worlds and microbatches train on the same global batch: the first loss is the same up to
// the order of a mean of 144 tokens, and training goes down alike. (Equality to the bit is
// verify's.)
TEST_F(TrainerTest, worlds_and_microbatches_train_on_one_batch) {
  const Outcome one = train_config(config(1));
  for (const auto& [ranks, microbatches] : {std::pair(2, 1), {4, 1}, {3, 2}, {1, 4}}) {
    Config other = config(ranks);
    other.training.microbatches = microbatches;
    const Outcome outcome = train_config(other);
    // A mean of 144 float32 losses near 6 in another order: (log2(144) + 7) half ulps of 8.
    EXPECT_NEAR(outcome.steps[0].loss, one.steps[0].loss, 16 * 2.4e-7);
    EXPECT_EQ(outcome.steps[0].rank_losses.size(), static_cast<size_t>(ranks));
    double mean = 0;
    for (const double loss : outcome.steps[0].rank_losses) mean += loss;
    EXPECT_EQ(outcome.steps[0].loss, mean / ranks);
  }
}

TEST_F(TrainerTest, trains) {
  Config config = this->config(2);
  config.training.steps = 30;
  config.optimizer.lr = 0.02;
  const Outcome outcome = train_config(config);
  // The text is 13 letters in 20 phases: far below the log(256) = 5.5 that it starts near.
  EXPECT_LT(outcome.steps.back().loss, outcome.steps.front().loss - 1);
  EXPECT_EQ(outcome.steps[0].lr, 0.02 / 5);
  EXPECT_LT(outcome.steps.back().lr, 0.02 * 0.15);
}

TEST_F(TrainerTest, zero_max_norm_leaves_gradients_alone) {
  Config clipped = config(2), free = config(2), loose = config(2);
  clipped.training.max_norm = 1e-3;
  free.training.max_norm = 0;
  loose.training.max_norm = 1e9;
  for (Config* config : {&clipped, &free, &loose}) {
    config->optimizer.name = "sgd";
    config->training.steps = 2;
  }
  const Outcome a = train_config(clipped), b = train_config(free), c = train_config(loose);
  EXPECT_EQ(a.steps[0].grad_norm, b.steps[0].grad_norm);
  EXPECT_FALSE(at::equal(a.parameters[0], b.parameters[0])) << "clipping must have clipped";
  for (size_t i = 0; i < b.parameters.size(); ++i) {
    EXPECT_TRUE(at::equal(b.parameters[i], c.parameters[i]));
  }
}

// A GPU has nothing to do while the host waits for it and then queues the next work: so once a
// step, for the loss and the norm together, and not for each microbatch.
TEST_F(TrainerTest, the_host_waits_once_a_step) {
  for (const int64_t microbatches : {1, 3}) {
    Config config = this->config(2);
    config.training.microbatches = microbatches;
    const DataLoader data(config, 256);
    fsdp::testing::LoopbackRuntime runtime(1, 2, at::kCPU);
    Trainer trainer(config, data, runtime);
    for (int64_t step = 0; step < 3; ++step) {
      const int before = runtime.host_waits;
      const StepResult result = trainer.step(step);
      EXPECT_EQ(runtime.host_waits, before + 1);
      EXPECT_GT(result.memory.peak_bytes, 0);
    }
  }
}

// The signal comes while the ranks are at different places; all must end after the same step, or
// the next collective would wait for ever.
TEST_F(TrainerTest, stops_after_the_step_in_which_a_rank_is_asked_to) {
  std::atomic<int> stop{0};
  TrainOptions options{.stop_signal = &stop};
  options.on_step = [&](const StepResult& step) {
    if (step.step == 1) stop = SIGTERM;
  };
  const Outcome outcome = train_config(config(3), options);
  ASSERT_EQ(outcome.steps.size(), 3u) << "the step in progress is finished";
  EXPECT_EQ(outcome.steps[1].stop_signal, 0);
  EXPECT_EQ(outcome.steps[2].stop_signal, SIGTERM);
}

}  // namespace
}  // namespace ppfsdp::train
