#include "src/train/verify.h"

#include <ATen/core/grad_mode.h>
#include <rapidcheck.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "sim/mesh/world.h"
#include "src/dtensor/dtensor.h"
#include "src/train/config_keys.h"
#include "src/train/recipe.h"
#include "src/train/test_util.h"

namespace ppfsdp::train {
namespace {

/// Passes on all calls; flips the last bit of the first element that the `faulty`-th reduce-scatter
/// of this rank gives.
class FaultyWorld : public comm::Communicator {
 public:
  FaultyWorld(comm::CommunicatorPtr inner, int faulty)
      : Communicator(inner->name(), inner->ranks(), inner->rank()),
        inner_(std::move(inner)),
        faulty_(faulty) {}

 private:
  void do_all_gather_into(const at::Tensor& output, const at::Tensor& input,
                          comm::Stream& stream) override {
    inner_->all_gather_into(output, input, stream);
  }
  void do_reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                         const comm::ReduceOp& op, comm::Stream& stream) override {
    inner_->reduce_scatter(output, input, op, stream);
    if (count_++ != faulty_) return;
    stream.run([output] { *reinterpret_cast<uint32_t*>(output.data_ptr<float>()) ^= 1; });
  }
  void do_all_reduce(const at::Tensor& tensor, const comm::ReduceOp& op,
                     comm::Stream& stream) override {
    inner_->all_reduce(tensor, op, stream);
  }
  void do_broadcast(const at::Tensor& tensor, int root, comm::Stream& stream) override {
    inner_->broadcast(tensor, root, stream);
  }
  void do_all_to_all(const at::Tensor& output, const at::Tensor& input,
                     const std::vector<int64_t>& output_splits,
                     const std::vector<int64_t>& input_splits, comm::Stream& stream) override {
    inner_->all_to_all(output, input, output_splits, input_splits, stream);
  }
  void do_send(const at::Tensor& tensor, int peer, comm::Stream& stream) override {
    inner_->send(tensor, peer, stream);
  }
  void do_recv(const at::Tensor& tensor, int peer, comm::Stream& stream) override {
    inner_->recv(tensor, peer, stream);
  }
  void do_barrier() override { inner_->barrier(); }
  comm::CommunicatorPtr do_subgroup(const std::vector<int>& members,
                                    const std::string& name) override {
    return inner_->subgroup(members, name);
  }

  comm::CommunicatorPtr inner_;
  int faulty_;
  int count_ = 0;
};

class FaultyRuntime : public comm::Runtime {
 public:
  FaultyRuntime(comm::Runtime& inner, int faulty)
      : inner_(inner), world_(std::make_shared<FaultyWorld>(inner.world(), faulty)) {}

  int rank() const override { return inner_.rank(); }
  int world_size() const override { return inner_.world_size(); }
  c10::Device device() const override { return inner_.device(); }
  std::string backend() const override { return inner_.backend(); }
  comm::ReductionOrder reduction_order() const override { return inner_.reduction_order(); }
  const comm::CommunicatorPtr& world() override { return world_; }
  comm::Stream& compute_stream() override { return inner_.compute_stream(); }
  std::shared_ptr<comm::Stream> create_stream(const std::string& name,
                                              comm::StreamPriority priority) override {
    return inner_.create_stream(name, priority);
  }
  void free_storage(const at::Tensor& tensor) override { inner_.free_storage(tensor); }
  void alloc_storage(const at::Tensor& tensor) override { inner_.alloc_storage(tensor); }

 private:
  comm::Runtime& inner_;
  comm::CommunicatorPtr world_;
};

class VerifyTest : public FolderTest {
 protected:
  void SetUp() override {
    FolderTest::SetUp();
    config_.data.files = {write_text()};
    config_.model.dim = 12;
    config_.model.layers = 2;
    config_.model.heads = 2;
    config_.model.kv_heads = 1;
    config_.model.hidden = 20;
    config_.data.seq_len = 6;
    config_.training.global_batch = 24;
    config_.training.steps = 3;
    config_.parallelism.ranks = 4;
  }

  using Tamper = std::function<void(Trainer& trainer, int rank, int64_t step)>;

  /// The verdicts of all steps; `tamper` runs on each rank before each.
  static std::vector<StepVerdict> verify(const Config& config, VerifyMode mode,
                                         std::optional<comm::ReductionOrder> order = {},
                                         const Tamper& tamper = nullptr) {
    const DataLoader data(config, 256);
    std::vector<StepVerdict> verdicts;
    sim::run_world(static_cast<int>(config.parallelism.ranks), {}, [&](comm::Runtime& runtime) {
      Verifier verifier(config, data, runtime, mode, order);
      for (int64_t step = 0; step < config.training.steps; ++step) {
        if (tamper) tamper(verifier.trainer(), runtime.rank(), step);
        if (auto verdict = verifier.step()) verdicts.push_back(*verdict);
      }
    });
    EXPECT_EQ(verdicts.size(), static_cast<size_t>(config.training.steps));
    return verdicts;
  }

  /// Changes one element of a parameter's shard that rank 2 holds, by `factor`, before step 1.
  static Tamper scale_element(double factor) {
    return [factor](Trainer& trainer, int rank, int64_t step) {
      if (rank != 2 || step != 1) return;
      const at::NoGradGuard no_grad;
      const at::Tensor weight = trainer.model()->named_parameters()["layers.1.attention.wq.weight"];
      dtensor::local_of(weight)[1][3].mul_(factor);
    };
  }

  Config config_;
};

// The project's claim, over drawn configurations: bit for bit one device's training.
TEST_F(VerifyTest, exact_for_any_config) {
  EXPECT_TRUE(rc::check([&] {
    Config config = config_;
    config.parallelism.ranks = *rc::gen::element(1, 2, 3, 4, 6);
    config.training.microbatches = *rc::gen::element(1, 2);
    config.training.steps = 2;
    config.training.seed = *rc::gen::inRange(0, 1000);
    config.model.dim = *rc::gen::element(4, 12, 20);
    config.model.layers = *rc::gen::inRange(1, 3);
    config.model.hidden = *rc::gen::inRange(1, 30);
    config.model.tied = *rc::gen::arbitrary<bool>();
    config.training.param_dtype = *rc::gen::element<std::string>("float32", "bfloat16");
    config.training.reduce_dtype = *rc::gen::element<std::string>("float32", "bfloat16");
    config.optimizer.name = *rc::gen::element<std::string>("adamw", "sgd");
    config.optimizer.implementation = *rc::gen::element<std::string>("foreach", "for-loop");
    config.training.max_norm = *rc::gen::element(0.0, 0.01, 1.0);
    config.training.reproducible_norm = *rc::gen::arbitrary<bool>();
    config.parallelism.reshard_after_forward =
        *rc::gen::element<ReshardSetting>(std::monostate(), true, false);
    RC_LOG() << "replay: ppfsdp verify with\n" << to_toml(config);
    for (const StepVerdict& verdict : verify(config, VerifyMode::kExact)) {
      RC_ASSERT(verdict.first_difference == "");
      RC_ASSERT(verdict.gradient_ulps == 0u && verdict.parameter_ulps == 0u);
      RC_ASSERT(verdict.sharded.loss == verdict.expected_loss);
      RC_ASSERT(verdict.sharded.grad_norm == verdict.expected_grad_norm);
    }
  }));
}

// With four ranks the order of the sum shows in the bits: exact must tell that the reference folds
// otherwise, and name where; the tolerance must not.
TEST_F(VerifyTest, another_order_of_reduction_is_found_by_exact_alone) {
  const auto verdicts = verify(config_, VerifyMode::kExact, comm::ReductionOrder::kTree);
  EXPECT_NE(verdicts[0].first_difference.find("step 1: the gradient "), std::string::npos)
      << verdicts[0].first_difference;
  EXPECT_GT(verdicts[0].gradient_ulps, 0u);
  EXPECT_GT(verdicts[2].parameter_ulps, 0u);
}

TEST_F(VerifyTest, tolerance_passes_every_dtype) {
  for (const char* param_dtype : {"float32", "bfloat16"}) {
    for (const char* reduce_dtype : {"float32", "bfloat16"}) {
      for (const int64_t microbatches : {1, 2}) {
        config_.training.param_dtype = param_dtype;
        config_.training.reduce_dtype = reduce_dtype;
        config_.training.microbatches = microbatches;
        for (const StepVerdict& verdict : verify(config_, VerifyMode::kTolerance)) {
          EXPECT_EQ(verdict.first_difference, "");
          EXPECT_GT(verdict.gradient_share, 0.0) << "nothing was compared";
          EXPECT_EQ(verdict.parameter_ulps, 0u);
        }
      }
    }
  }
}

// One element of one shard, wrong by one part in a thousand, is the smallest of faults.
TEST_F(VerifyTest, one_wrong_element_is_found_and_named) {
  const auto exact = verify(config_, VerifyMode::kExact, {}, scale_element(1.001));
  EXPECT_EQ(exact[0].first_difference, "");
  EXPECT_EQ(exact[1].first_difference.find("step 2: "), 0u) << exact[1].first_difference;
  const auto tolerance = verify(config_, VerifyMode::kTolerance, {}, scale_element(1.001));
  EXPECT_EQ(tolerance[0].first_difference, "");
  EXPECT_NE(tolerance[1].first_difference, "");
}

// A shard that is not updated leaves loss and gradient of the step right; the parameter must be
// named, with the rank that holds it. Rows 6 to 8 of 12 are rank 2's.
TEST_F(VerifyTest, stale_shard_names_parameter_step_and_rank) {
  const Tamper freeze = [&](Trainer& trainer, int rank, int64_t step) {
    if (rank != 2 || step != 1) return;
    // The gradient that the optimizer sees is right, its learning rate is not.
    const at::Tensor weight = trainer.model()->named_parameters()["layers.1.attention.wq.weight"];
    const size_t index = [&] {
      const auto& all = trainer.optimizer().parameters();
      for (size_t i = 0; i < all.size(); ++i) {
        if (all[i].is_same(weight)) return i;
      }
      return all.size();
    }();
    const at::NoGradGuard no_grad;
    dtensor::local_of(trainer.optimizer().state(index, "exp_avg")).zero_();
  };
  for (const VerifyMode mode : {VerifyMode::kExact, VerifyMode::kTolerance}) {
    const auto verdicts = verify(config_, mode, {}, freeze);
    EXPECT_EQ(verdicts[0].first_difference, "");
    EXPECT_EQ(verdicts[1].first_difference.find(
                  "step 2: the parameter layers.1.attention.wq.weight on rank 2 is "),
              0u)
        << verdicts[1].first_difference;
    EXPECT_NE(verdicts[1].first_difference.find(" at [6, 0] ("), std::string::npos)
        << verdicts[1].first_difference;
  }
}

// The smallest fault that communication can make: one bit of one element on one rank. Three groups
// reduce a step, so the fifth is in the second step.
TEST_F(VerifyTest, one_flipped_bit_of_a_reduction_names_parameter_step_and_rank) {
  // The clip coefficient would spread it over all gradients.
  config_.training.max_norm = 0;
  const DataLoader data(config_, 256);
  std::vector<StepVerdict> verdicts;
  sim::run_world(4, {}, [&](comm::Runtime& runtime) {
    const int never = -1;
    FaultyRuntime faulty(runtime, runtime.rank() == 2 ? 4 : never);
    Verifier verifier(config_, data, faulty, VerifyMode::kExact);
    for (int64_t step = 0; step < 2; ++step) {
      if (auto verdict = verifier.step()) verdicts.push_back(*verdict);
    }
  });
  ASSERT_EQ(verdicts.size(), 2u);
  EXPECT_EQ(verdicts[0].first_difference, "");
  EXPECT_EQ(verdicts[1].gradient_ulps, 1u);
  const std::string& said = verdicts[1].first_difference;
  EXPECT_EQ(said.find("step 2: the gradient layers."), 0u) << said;
  EXPECT_NE(said.find(" on rank 2 is "), std::string::npos) << said;
}

// A reference on the CPU has neither a GPU's order of additions nor the values that one draws; what
// is compared all the same would differ for these reasons.
TEST(RefuseVerifyTest, gpus_are_verified_by_tolerance_from_given_weights) {
  Config config;
  const c10::Device gpu(c10::kCUDA, 1);
  for (const VerifyMode mode : {VerifyMode::kExact, VerifyMode::kTolerance}) {
    EXPECT_EQ(refuse_verify(config, mode, c10::kCPU), "");
  }
  EXPECT_NE(refuse_verify(config, VerifyMode::kTolerance, gpu).find("cuda:1 needs model.weights"),
            std::string::npos);
  config.model.weights = "weights.safetensors";
  EXPECT_EQ(refuse_verify(config, VerifyMode::kTolerance, gpu), "");
  EXPECT_NE(refuse_verify(config, VerifyMode::kExact, gpu).find("--tolerance"), std::string::npos);
}

}  // namespace
}  // namespace ppfsdp::train
