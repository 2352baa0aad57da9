#include "src/train/memory_need.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <string>

#include "src/comm/single_runtime.h"

namespace ppfsdp::train {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr double kGiB = 1 << 30;

Config config_of(const std::string& model, const std::string& backend = "sim") {
  Config config;
  config.model.name = model;
  config.communication.backend = backend;
  return config;
}

// The published count of Llama 2 7B's parameters, four bytes each, four values: the parameter, its
// gradient and AdamW's two moments.
TEST(MemoryNeed, CountsParametersGradientsAndOptimizerState) {
  constexpr double kParameters = 6738415616.0;
  Config config = config_of("llama2-7b");
  EXPECT_EQ(least_bytes(config), kParameters * 16);
  config.optimizer.name = "sgd";
  EXPECT_EQ(least_bytes(config), kParameters * 12);
  config.optimizer.momentum = 0;
  EXPECT_EQ(least_bytes(config), kParameters * 8);
  config.parallelism.ranks = 64;
  EXPECT_EQ(least_bytes(config), kParameters * 8) << "sharded once, over however many ranks";
}

TEST(MemoryNeed, RefusesWhatDoesNotFitAndNothingElse) {
  const Config config = config_of("llama2-7b");
  const double need = least_bytes(config);
  EXPECT_EQ(refuse_memory(config, need, 1), "");
  EXPECT_NE(refuse_memory(config, need - 1, 1), "");
  EXPECT_EQ(refuse_memory(config_of("debug"), kGiB, 1), "");
  EXPECT_EQ(refuse_memory(config_of("llama3-405b"), 32 * kGiB, 1),
            "training model.name = \"llama3-405b\" needs at least 6047.7 GiB of memory on this "
            "machine, which has 32.0 GiB: 405.85 G parameters, their gradients and 2 value(s) of "
            "optimizer state each, in float32; choose a smaller model, or more machines");
}

// Under a launcher a machine holds the shards of its own processes.
TEST(MemoryNeed, OfALaunchedWorldIsThisMachinesShare) {
  Config config = config_of("llama2-7b", "gloo");
  config.parallelism.ranks = 8;
  const double need = least_bytes(config);
  EXPECT_EQ(refuse_memory(config, need / 4, 2), "");
  EXPECT_THAT(refuse_memory(config, need / 4, 3),
              AllOf(HasSubstr("needs at least 37.7 GiB"), HasSubstr(", 3 of 8 ranks;")));
  // Simulated ranks are all in this one process.
  config.communication.backend = "sim";
  EXPECT_NE(refuse_memory(config, need / 4, 2), "");
}

/// A rank with a GPU of 80 GiB.
class GpuRuntime : public comm::Runtime {
 public:
  int rank() const override { return 0; }
  int world_size() const override { return 2; }
  c10::Device device() const override { return c10::Device(c10::kCUDA, 3); }
  std::string backend() const override { return "fake"; }
  comm::ReductionOrder reduction_order() const override { return {}; }
  const comm::CommunicatorPtr& world() override { return world_; }
  comm::Stream& compute_stream() override { throw std::logic_error("not asked for"); }
  std::shared_ptr<comm::Stream> create_stream(const std::string&, comm::StreamPriority) override {
    return nullptr;
  }
  comm::MemoryUse memory_use() const override {
    return {.peak_bytes = 0, .total_bytes = int64_t{80} << 30};
  }

 private:
  comm::CommunicatorPtr world_;
};

// A rank with a GPU needs its own share of that GPU's memory, however much the machine has.
TEST(MemoryNeed, OfARankWithAGpuIsItsShareOfThatGpu) {
  const GpuRuntime runtime;
  EXPECT_EQ(refuse_device_memory(config_of("llama2-7b", "nccl"), runtime), "");
  EXPECT_THAT(refuse_device_memory(config_of("llama2-13b", "nccl"), runtime),
              AllOf(HasSubstr("on cuda:3, which has 80.0 GiB"), HasSubstr(", 1 of 2 ranks;"),
                    HasSubstr("or more devices")));
  EXPECT_EQ(refuse_device_memory(config_of("llama3-405b"), *comm::make_single_runtime()), "");
}

// Numbers that no machine has must not wrap round to small ones.
TEST(MemoryNeed, HoldsForTheLargestModelThatAConfigCanName) {
  Config config = config_of("debug");
  config.model.dim = 1 << 22;
  config.model.heads = config.model.kv_heads = 1;
  config.model.hidden = 1 << 24;
  config.model.layers = 4096;
  EXPECT_GT(least_bytes(config), 1e18);
}

}  // namespace
}  // namespace ppfsdp::train
