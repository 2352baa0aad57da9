// Training that starts from a model built on meta, beside a model that was built and initialised
// plainly on one device.
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "backends/gloo/testing/thread_world.h"
#include "sim/mesh/world.h"
#include "src/checkpoint/safetensors.h"
#include "src/comm/single_runtime.h"
#include "src/dtensor/dtensor.h"
#include "src/train/config_error.h"
#include "src/train/recipe.h"
#include "src/train/test_util.h"
#include "src/train/verify.h"

namespace ppfsdp::train {
namespace {

class InitTest : public FolderTest {
 protected:
  /// Sizes that no world here divides evenly.
  Config config(int64_t ranks) const {
    Config config;
    config.model.dim = 10;
    config.model.layers = 2;
    config.model.heads = 5;
    config.model.kv_heads = 1;
    config.model.hidden = 13;
    config.data.files = {write_text()};
    config.data.seq_len = 4;
    config.training.global_batch = 84;
    config.training.steps = 3;
    config.training.seed = 11;
    config.parallelism.ranks = ranks;
    return config;
  }

  static void on_ranks(const Config& config, const std::function<void(comm::Runtime&)>& fn) {
    const int ranks = static_cast<int>(config.parallelism.ranks);
    if (config.communication.backend == "single") {
      fn(*comm::make_single_runtime());
    } else if (config.communication.backend == "gloo") {
      gloo::testing::run_threads(ranks, {}, fn);
    } else {
      sim::run_world(ranks, {.schedule = sim::Schedule::kRandom}, fn);
    }
  }

  /// Every step's loss, norm, gradients and parameters have the bits of the plain model's.
  static void expect_trains_as_one_device(const Config& config) {
    const DataLoader data(config, 256);
    on_ranks(config, [&](comm::Runtime& runtime) {
      Verifier verifier(config, data, runtime, VerifyMode::kExact);
      for (int64_t step = 0; step < config.training.steps; ++step) {
        const std::optional<StepVerdict> verdict = verifier.step();
        if (verdict) {
          EXPECT_EQ(verdict->first_difference, "");
        }
      }
    });
  }

  static at::Tensor whole(const at::Tensor& tensor) {
    const at::NoGradGuard no_grad;
    return dtensor::is_dtensor(tensor) ? dtensor::full_tensor(tensor) : tensor;
  }
};

// The same values from the same seed, whatever the sharding, and the generator where it would be:
// what is drawn next, by dropout say, is the same as well.
TEST_F(InitTest, InitialValuesAreOneDevices) {
  for (const bool tied : {false, true}) {
    Config config = this->config(1);
    config.model.tied = tied;
    nn::Llama plain = make_model(config);
    const at::Tensor state = at::globalContext().defaultGenerator(at::kCPU).get_state();
    const auto expected = plain->named_parameters();
    for (const int64_t ranks : {1, 2, 3, 4, 7}) {
      config.parallelism.ranks = ranks;
      // Not the seed's state: initialize must set it.
      at::manual_seed(1234);
      on_ranks(config, [&](comm::Runtime& runtime) {
        nn::Llama model = make_meta_model(config);
        shard(config, model, runtime);
        initialize(config, model, runtime);
        const auto parameters = model->named_parameters();
        ASSERT_EQ(parameters.keys(), expected.keys());
        for (const auto& item : parameters) {
          EXPECT_TRUE(at::equal(whole(item.value()), expected[item.key()])) << item.key();
        }
        EXPECT_TRUE(at::equal(model->table, plain->table));
        EXPECT_TRUE(at::equal(runtime.default_generator().get_state(), state));
      });
    }
  }
}

// On Gloo a rank is a process with a generator of its own, and not one of this process's threads:
// cli_test runs verify there.
TEST_F(InitTest, TrainsAsAPlainlyBuiltModel) {
  for (const int64_t ranks : {1, 2, 3, 4, 7}) expect_trains_as_one_device(config(ranks));
  Config other = config(3);
  other.model.tied = true;
  other.training.param_dtype = "bfloat16";
  expect_trains_as_one_device(other);
  other = config(1);
  other.communication.backend = "single";
  expect_trains_as_one_device(other);
}

// And from weights: the one device loads them whole.
TEST_F(InitTest, TrainsFromWeightsAsAPlainlyBuiltModel) {
  for (const bool tied : {false, true}) {
    Config config = this->config(3);
    config.model.tied = tied;
    config.training.seed = 77;
    std::vector<std::pair<std::string, at::Tensor>> values;
    for (const auto& item : make_model(config)->named_parameters()) {
      values.emplace_back(item.key(), item.value().detach());
    }
    config.model.weights = path("model.safetensors");
    checkpoint::save_safetensors(config.model.weights, values);
    config.training.seed = 11;
    for (const char* reader : {"every_rank", "rank_zero"}) {
      config.model.weights_reader = reader;
      expect_trains_as_one_device(config);
      Config gloo = config;
      gloo.communication.backend = "gloo";
      gloo.parallelism.ranks = 2;
      expect_trains_as_one_device(gloo);
    }
    on_ranks(config, [&](comm::Runtime& runtime) {
      nn::Llama model = make_meta_model(config);
      shard(config, model, runtime);
      EXPECT_TRUE(initialize(config, model, runtime).converted.empty());
      const auto parameters = model->named_parameters();
      for (const auto& [name, value] : values) {
        EXPECT_TRUE(at::equal(whole(parameters[name]), value)) << name << " is not the seed's";
      }
    });
  }
}

// Every rank ends, with a config's fault.
TEST_F(InitTest, WeightsThatDoNotFitAreAConfigError) {
  Config config = this->config(2);
  config.model.weights = path("model.safetensors");
  checkpoint::save_safetensors(config.model.weights, {});
  for (const char* backend : {"sim", "gloo"}) {
    config.communication.backend = backend;
    on_ranks(config, [&](comm::Runtime& runtime) {
      nn::Llama model = make_meta_model(config);
      shard(config, model, runtime);
      const std::string error =
          message_of<ConfigError>([&] { initialize(config, model, runtime); });
      EXPECT_EQ(error.find("model.weights = \"" + config.model.weights + "\": "), 0u) << error;
      EXPECT_NE(error.find("what the model has is missing: tok_embeddings.weight"),
                std::string::npos)
          << error;
    });
  }
}

}  // namespace
}  // namespace ppfsdp::train
