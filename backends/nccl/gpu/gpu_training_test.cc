// Training on GPUs is the CPU's, and the same each time.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

#include "backends/nccl/gpu/loopback.h"
#include "backends/nccl/gpu/testing.h"
#include "backends/nccl/gpu/training.h"
#include "golden/case.h"
#include "golden/compare.h"
#include "golden/train.h"
#include "src/comm/single_runtime.h"
#include "src/comm/testing/values.h"
#include "src/dtensor/dtensor.h"

namespace ppfsdp::nccl::testing {
namespace {

using comm::testing::difference_in_bits;

/// The same on every rank, or the test fails.
golden::Outputs train_on_gpus(const golden::Case& config, const golden::Inputs& inputs) {
  std::vector<golden::Outputs> by_rank(config.world);
  run_gpus(static_cast<int>(config.world), [&](NcclRuntime& runtime) {
    by_rank[runtime.rank()] = golden::train_sharded(config, inputs, runtime);
  });
  for (const golden::Outputs& outputs : by_rank) {
    const golden::Difference difference = golden::compare(outputs, by_rank[0]);
    EXPECT_TRUE(difference.bitwise) << "ranks differ: " << difference.first;
  }
  return by_rank[0];
}

golden::Case small_llama(int world) {
  return {.world = world,
          .vocab = 256,
          .dim = 64,
          .heads = 4,
          .kv_heads = 2,
          .layers = 2,
          .hidden = 176,
          .batch = 2,
          .seq = 32,
          .steps = 3};
}

struct Variant {
  std::string name;
  std::function<void(golden::Case&)> change;
};

std::ostream& operator<<(std::ostream& out, const Variant& variant) { return out << variant.name; }

const std::vector<Variant> kVariants = {
    {"float32", [](golden::Case&) {}},
    {"bfloat16",
     [](golden::Case& config) {
       config.param_dtype = at::kBFloat16;
       config.reduce_dtype = at::kFloat;
       config.accumulate = 2;
     }},
    {"clippedByTheLargest",
     [](golden::Case& config) {
       config.norm_type = HUGE_VAL;
       config.clip = 0.05;
       config.optimizer = "sgd";
       config.foreach = true;
       config.lr = 0.1;
     }},
};

void expect_within_tolerance(const golden::Case& config, const golden::Outputs& gpu,
                             const golden::Outputs& cpu) {
  const golden::Difference difference = golden::compare(gpu, cpu);
  const golden::Tolerance tolerance = golden::tolerance(config, difference);
  EXPECT_TRUE(golden::within(difference, tolerance))
      << difference.first << "; loss " << difference.loss_rel << " of " << tolerance.loss_rel
      << ", norm " << difference.grad_norm_rel << " of " << tolerance.grad_norm_rel
      << ", gradients " << difference.grad_abs << " of " << tolerance.grad_abs << ", parameters "
      << difference.param_abs << " of " << tolerance.param_abs << " and in the mean "
      << difference.param_rms << " of " << tolerance.param_rms;
  ::testing::Test::RecordProperty("gradients_off_their_tolerance",
                                  std::to_string(difference.grad_abs / tolerance.grad_abs));
}

// The tolerance is that of golden/compare.h, for runs of the same operations that add in other
// orders. What it says holds for a GPU's kernels too: products of float32 add float32 terms (no
// TF32), or, in attention, terms of three TF32 products each, which leaves 2^-22 of a term out,
// less than the sqrt(n) 2^-24 that it counts for a sum; and products of bfloat16 add in float32 and
// round once.
class GpuTraining : public ::testing::TestWithParam<std::tuple<Variant, int>> {
 protected:
  GpuTraining() : config_(small_llama(std::get<1>(GetParam()))) {
    std::get<0>(GetParam()).change(config_);
    inputs_ = golden::make_inputs(config_, config_.steps);
  }

  Deterministic deterministic_;
  golden::Case config_;
  golden::Inputs inputs_;
};

// Losses, norms, clipped gradients and parameters. A missing wait or a wrong buffer gives those of
// other parameters or steps.
TEST_P(GpuTraining, IsTheCpusWithinTolerance) {
  const golden::Outputs gpu = train_on_gpus(config_, inputs_);
  expect_within_tolerance(config_, gpu,
                          golden::train_single(config_, inputs_, comm::ReductionOrder::kRankOrder));
}

// A race between streams, or an operation whose order of additions is left to chance.
TEST_P(GpuTraining, HasTheSameBitsEachTime) {
  const golden::Outputs first = train_on_gpus(config_, inputs_);
  for (int again = 0; again < 2; ++again) {
    const golden::Difference difference = golden::compare(train_on_gpus(config_, inputs_), first);
    EXPECT_TRUE(difference.bitwise) << difference.first;
  }
}

INSTANTIATE_TEST_SUITE_P(Variants, GpuTraining,
                         ::testing::Combine(::testing::ValuesIn(kVariants),
                                            ::testing::ValuesIn(world_sizes())),
                         [](const auto& info) {
                           return std::get<0>(info.param).name + "On" +
                                  std::to_string(std::get<1>(info.param));
                         });

/// A rank among three copies of itself: gathers give its own shards four times, so what is trained
/// is no Llama, but the same on the CPU, where the same copies are done one by one.
class OneOfFour : public ::testing::TestWithParam<std::tuple<Variant, int>> {};

// On a GPU, buffers of several ranks are filled and read by other operations than on the CPU, on
// streams that run at the same time. Wrong offsets, padding or waits give other parameters.
TEST_P(OneOfFour, IsTheCpusWithinTolerance) {
  golden::Case config = small_llama(/*world=*/4);
  const auto& [variant, rank] = GetParam();
  variant.change(config);
  const golden::Inputs inputs = golden::make_inputs(config, config.steps);
  const auto train = [&, rank = rank](comm::Runtime& own) {
    Loopback loopback(own, rank, 4);
    return golden::train_sharded(config, inputs, loopback);
  };
  const Deterministic deterministic;
  golden::Outputs gpu;
  run_gpus(1, [&](NcclRuntime& runtime) { gpu = train(runtime); });
  expect_within_tolerance(config, gpu, train(*comm::make_single_runtime()));
}

const std::vector<Variant> kShardings = {
    kVariants[0],
    kVariants[1],
    {"uneven",
     [](golden::Case& config) {
       config.vocab = 253;
       config.hidden = 175;
     }},
    {"reshardedToTwo", [](golden::Case& config) { config.reshard = int64_t{2}; }},
    {"kept",
     [](golden::Case& config) {
       config.reshard = false;
       config.tied = true;
     }},
};

INSTANTIATE_TEST_SUITE_P(Shardings, OneOfFour,
                         ::testing::Combine(::testing::ValuesIn(kShardings),
                                            ::testing::Values(0, 3)),
                         [](const auto& info) {
                           return std::get<0>(info.param).name + "Rank" +
                                  std::to_string(std::get<1>(info.param));
                         });

std::vector<std::filesystem::path> recorded_cases() {
  std::vector<std::filesystem::path> result;
  for (const auto& entry : std::filesystem::directory_iterator("golden/cases")) {
    if (entry.path().extension() == ".json") result.push_back(entry.path());
  }
  std::ranges::sort(result);
  return result;
}

class RecordedCase : public ::testing::TestWithParam<std::filesystem::path> {};

TEST_P(RecordedCase, IsRepeatedWithinTolerance) {
  const golden::Recording recording = golden::read_recording(GetParam());
  const auto world = static_cast<int>(recording.config.world);
  if (visible_gpus() > 0 && world > visible_gpus()) {
    GTEST_SKIP() << "needs " << world << " GPUs, there are " << visible_gpus();
  }
  const Deterministic deterministic;
  const golden::Difference difference =
      golden::compare(train_on_gpus(recording.config, recording.inputs), recording.outputs);
  EXPECT_TRUE(golden::within(difference, golden::tolerance(recording.config, difference)))
      << difference.first;
}

INSTANTIATE_TEST_SUITE_P(Golden, RecordedCase, ::testing::ValuesIn(recorded_cases()),
                         [](const auto& info) { return info.param.stem().string(); });

/// Losses of three steps and what the parameters are after them, on the CPU.
std::vector<at::Tensor> train(const TrainingOptions& options, comm::Runtime& runtime) {
  Training training(options, runtime);
  std::vector<at::Tensor> result;
  for (int step = 0; step < 3; ++step) {
    training.step();
    result.push_back(training.loss().cpu());
    result.push_back(training.grad_norm().cpu());
  }
  for (const at::Tensor& parameter : training.parameters()) {
    result.push_back(dtensor::local_of(parameter).cpu());
  }
  return result;
}

const nn::LlamaConfig kModel = {.vocab_size = 512,
                                .dim = 256,
                                .n_layers = 3,
                                .n_heads = 4,
                                .hidden_dim = 704,
                                .max_seq_len = 64};
const fsdp::MixedPrecisionPolicy kMixed = {.param_dtype = at::kBFloat16,
                                           .reduce_dtype = at::kFloat};

/// `fn` on each rank of NCCL worlds, and on one of a loopback world of four.
void on_worlds(const std::function<void(comm::Runtime& runtime)>& fn) {
  for (const int n : world_sizes()) {
    run_gpus(n, [&](NcclRuntime& runtime) { fn(runtime); });
  }
  run_gpus(1, [&](NcclRuntime& runtime) {
    Loopback loopback(runtime, /*rank=*/1, /*world_size=*/4);
    fn(loopback);
  });
}

// Registered buffers that are too small, shared by two groups at once or freed too early.
TEST(RegisteredMemory, ChangesNoBit) {
  const Deterministic deterministic;
  for (const fsdp::MixedPrecisionPolicy& policy : {fsdp::MixedPrecisionPolicy{}, kMixed}) {
    on_worlds([&](comm::Runtime& runtime) {
      TrainingOptions options = {.model = kModel, .policy = policy, .batch = 2};
      const std::vector<at::Tensor> plain = train(options, runtime);
      options.registered_memory = true;
      const std::vector<at::Tensor> registered = train(options, runtime);
      ASSERT_EQ(plain.size(), registered.size());
      for (size_t i = 0; i < plain.size(); ++i) {
        EXPECT_EQ(difference_in_bits(registered[i], plain[i]), "")
            << "value " << i << " on " << runtime.backend() << ", "
            << (policy.param_dtype ? "bfloat16" : "float32");
      }
    });
  }
}

}  // namespace
}  // namespace ppfsdp::nccl::testing
