#include "src/checkpoint/load_weights.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <functional>
#include <string>

#include "backends/gloo/testing/thread_world.h"
#include "sim/mesh/world.h"
#include "src/checkpoint/safetensors.h"
#include "src/comm/single_runtime.h"
#include "src/dtensor/dtensor.h"
#include "src/fsdp/fully_shard.h"
#include "src/mesh/device_mesh.h"
#include "src/nn/llama.h"
#include "src/nn/to_empty.h"

namespace ppfsdp::checkpoint {
namespace {

namespace fs = std::filesystem;
using dtensor::Placement;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using Tensors = std::vector<std::pair<std::string, at::Tensor>>;
constexpr WeightsReader kReaders[] = {WeightsReader::kEveryRank, WeightsReader::kRankZero};

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

/// No size is a multiple of 3 or 4, and the last ranks of four hold nothing of the norms.
nn::LlamaConfig small(bool tied) {
  return {.vocab_size = 11,
          .dim = 10,
          .n_layers = 2,
          .n_heads = 5,
          .hidden_dim = 7,
          .max_seq_len = 8,
          .tied_output = tied};
}

nn::Llama plain_model(bool tied) {
  at::manual_seed(5);
  return nn::Llama(small(tied));
}

/// Sharded, with memory and the rotary table, but without values.
nn::Llama sharded_model(bool tied, comm::Runtime& runtime, at::ScalarType dtype = at::kFloat,
                        fsdp::ReshardAfterForward reshard = {}) {
  nn::Llama model(small(tied), at::TensorOptions(dtype).device(at::kMeta));
  const auto mesh = mesh::DeviceMesh::create(runtime, {runtime.world_size()});
  const fsdp::FullyShardOptions options{.mesh = mesh, .reshard_after_forward = reshard};
  for (nn::LlamaBlock& block : model->blocks()) fsdp::fully_shard(*block, options);
  fsdp::fully_shard(*model, options);
  nn::to_empty(*model, runtime.device());
  model->reset_parameters();
  return model;
}

at::Tensor loss_of(nn::Llama& model) {
  return model(at::arange(8, at::kLong).view({2, 4})).pow(2).sum();
}

class LoadWeightsTest : public ::testing::Test {
 protected:
  LoadWeightsTest()
      : path_(fs::path(::testing::TempDir()) /
              ("load." + std::to_string(getpid()) + ".safetensors")) {}
  ~LoadWeightsTest() override { fs::remove(path_); }

  static Tensors values_of(nn::Llama& model) {
    Tensors tensors;
    for (const auto& item : model->named_parameters()) {
      tensors.emplace_back(item.key(), item.value().detach());
    }
    return tensors;
  }

  void save(const Tensors& tensors) const { save_safetensors(path_, tensors); }

  fs::path path_;
};

void expect_equal(const nn::Llama& got, const nn::Llama& want) {
  const at::NoGradGuard no_grad;
  const auto expected = want->named_parameters();
  for (const auto& item : got->named_parameters()) {
    EXPECT_TRUE(at::equal(dtensor::full_tensor(item.value()), expected[item.key()])) << item.key();
  }
}

void load_on(comm::Runtime& runtime, const fs::path& path, nn::Llama& plain, bool tied,
             WeightsReader reader) {
  nn::Llama model = sharded_model(tied, runtime);
  const LoadReport report = load_weights(*model, path, runtime, {.reader = reader});
  EXPECT_THAT(report.missing, IsEmpty());
  EXPECT_THAT(report.unknown, IsEmpty());
  EXPECT_THAT(report.converted, IsEmpty());
  expect_equal(model, plain);
  EXPECT_TRUE(at::equal(loss_of(model), loss_of(plain)));
}

// Every rank's part of every uneven tensor, whichever rank reads it.
TEST_F(LoadWeightsTest, EqualsThePlainModel) {
  for (const bool tied : {false, true}) {
    nn::Llama plain = plain_model(tied);
    save(values_of(plain));
    for (const WeightsReader reader : kReaders) {
      for (const int world : {1, 3, 4}) {
        sim::run_world(world, {.schedule = sim::Schedule::kRandom}, [&](comm::Runtime& runtime) {
          load_on(runtime, path_, plain, tied, reader);
        });
      }
      gloo::testing::run_threads(
          2, {}, [&](comm::Runtime& runtime) { load_on(runtime, path_, plain, tied, reader); });
    }
  }
}

TEST_F(LoadWeightsTest, IntoAPlainModel) {
  nn::Llama plain = plain_model(false);
  save(values_of(plain));
  nn::Llama other(small(false));
  load_weights(*other, path_, *comm::make_single_runtime());
  for (size_t i = 0; i < plain->parameters().size(); ++i) {
    EXPECT_TRUE(at::equal(other->parameters()[i], plain->parameters()[i]));
  }
}

// What has been gathered from the shards before is out of date.
TEST_F(LoadWeightsTest, ForwardUsesWhatWasLoadedSinceTheLast) {
  nn::Llama plain = plain_model(false);
  save(values_of(plain));
  for (const WeightsReader reader : kReaders) {
    sim::run_world(2, {}, [&](comm::Runtime& runtime) {
      nn::Llama model = sharded_model(false, runtime, at::kFloat, /*reshard=*/false);
      const at::NoGradGuard no_grad;
      EXPECT_TRUE(loss_of(model).isnan().item<bool>());
      load_weights(*model, path_, runtime, {.reader = reader});
      EXPECT_TRUE(at::equal(loss_of(model), loss_of(plain)));
    });
  }
}

TEST_F(LoadWeightsTest, FloatingPointDtypesAreConverted) {
  nn::Llama plain = plain_model(true);
  Tensors half;
  for (const auto& [name, value] : values_of(plain)) half.emplace_back(name, value.to(at::kHalf));
  half[1].second = half[1].second.to(at::kDouble);
  save(half);
  for (const WeightsReader reader : kReaders) {
    sim::run_world(3, {}, [&](comm::Runtime& runtime) {
      nn::Llama model = sharded_model(true, runtime, at::kDouble);
      const LoadReport report = load_weights(*model, path_, runtime, {.reader = reader});
      EXPECT_EQ(report.converted.size(), half.size() - 1);
      EXPECT_EQ(report.converted[0], "tok_embeddings.weight: Half to Double");
      const at::NoGradGuard no_grad;
      EXPECT_TRUE(
          at::equal(dtensor::full_tensor(model->parameters()[0]), half[0].second.to(at::kDouble)));
    });
  }
}

// Which of its names a file gives a tied parameter is the writer's choice; two values are not.
TEST_F(LoadWeightsTest, ATiedParameterHasSeveralNames) {
  nn::Llama plain = plain_model(true);
  Tensors values = values_of(plain);
  ASSERT_EQ(values[0].first, "tok_embeddings.weight");
  const auto loads = [&](WeightsReader reader) {
    sim::run_world(3, {},
                   [&](comm::Runtime& runtime) { load_on(runtime, path_, plain, true, reader); });
  };
  Tensors other_name = values, both_names = values, two_values = values;
  other_name[0].first = "output.weight";
  both_names.emplace_back("output.weight", values[0].second);
  two_values.emplace_back("output.weight", values[0].second.clone());
  two_values.back().second[10][9] += 1;  // of the last rank's rows
  for (const WeightsReader reader : kReaders) {
    save(other_name);
    loads(reader);
    save(both_names);
    loads(reader);
    save(two_values);
    std::vector<std::string> errors(3);
    sim::run_world(3, {}, [&](comm::Runtime& runtime) {
      nn::Llama model = sharded_model(true, runtime);
      errors[runtime.rank()] =
          error_of([&] { load_weights(*model, path_, runtime, {.reader = reader}); });
    });
    // A fault met while reading, by one rank alone.
    for (const std::string& error : errors) {
      EXPECT_THAT(error, AllOf(HasSubstr(reader == kReaders[0] ? "on rank 2: " : "on rank 0: "),
                               HasSubstr("tensors 'tok_embeddings.weight' and 'output.weight' "
                                         "differ")));
    }
  }
}

// Names the file, the tensor, what was got and what is right; all faults at once; on every rank the
// same, also on those that read nothing.
TEST_F(LoadWeightsTest, FaultsAreEveryRanksError) {
  nn::Llama plain = plain_model(false);
  const Tensors values = values_of(plain);
  const auto error_with = [&](WeightsReader reader, const Tensors& tensors) {
    save(tensors);
    std::vector<std::string> errors(3);
    sim::run_world(3, {}, [&](comm::Runtime& runtime) {
      nn::Llama model = sharded_model(false, runtime);
      errors[runtime.rank()] =
          error_of([&] { load_weights(*model, path_, runtime, {.reader = reader}); });
    });
    EXPECT_EQ(errors[0], errors[1]);
    EXPECT_EQ(errors[0], errors[2]);
    EXPECT_THAT(errors[0], HasSubstr(path_.string()));
    return errors[0];
  };
  for (const WeightsReader reader : kReaders) {
    Tensors changed = values;
    changed.erase(changed.begin() + 2);
    changed.emplace_back("lm_head.weight", at::zeros({2}));
    EXPECT_THAT(error_with(reader, changed),
                AllOf(HasSubstr("what the model has is missing: " + values[2].first),
                      HasSubstr("the model has nothing called lm_head.weight")));
    changed = values;
    changed[0].second = at::zeros({11, 9});
    changed[1].second = at::zeros({10, 10}, at::kLong);
    EXPECT_THAT(
        error_with(reader, changed),
        AllOf(HasSubstr("tensor 'tok_embeddings.weight' has sizes [11, 9], the model's has [11, "
                        "10]"),
              HasSubstr("is Long, the model's is Float; only floating-point dtypes are")));
    EXPECT_THAT(error_with(reader, {}), HasSubstr("and 13 more"));
    // A message is to be read, whatever a file calls its tensors.
    changed = values;
    changed.emplace_back(std::string(100000, 'x'), at::zeros({2}));
    EXPECT_LT(error_with(reader, changed).size(), 5000u);
    fs::remove(path_);
    sim::run_world(3, {}, [&](comm::Runtime& runtime) {
      nn::Llama model = sharded_model(false, runtime);
      EXPECT_THAT(error_of([&] { load_weights(*model, path_, runtime, {.reader = reader}); }),
                  HasSubstr("can't open"));
    });
  }
}

// What is wrong with a file is not always an error of LibTorch's class: a rank that let another
// through would leave the rest waiting.
TEST_F(LoadWeightsTest, ErrorsOfAnyClassEndEveryRankOfGloo) {
  const std::string header = R"({"x": 1e999})";
  std::ofstream out(path_, std::ios::binary);
  const uint64_t length = header.size();
  out.write(reinterpret_cast<const char*>(&length), sizeof length);
  out << header;
  out.close();
  for (const WeightsReader reader : kReaders) {
    gloo::testing::run_threads(2, {}, [&](comm::Runtime& runtime) {
      nn::Llama model = sharded_model(false, runtime);
      EXPECT_THAT(error_of([&] { load_weights(*model, path_, runtime, {.reader = reader}); }),
                  HasSubstr("the header is not JSON at offset"));
    });
  }
}

// On processes nothing ends the ranks that wait for one that has thrown.
TEST_F(LoadWeightsTest, FaultsEndEveryRankOfGloo) {
  nn::Llama plain = plain_model(false);
  Tensors values = values_of(plain);
  values.pop_back();
  save(values);
  for (const WeightsReader reader : kReaders) {
    gloo::testing::run_threads(2, {}, [&](comm::Runtime& runtime) {
      nn::Llama model = sharded_model(false, runtime);
      EXPECT_THAT(error_of([&] { load_weights(*model, path_, runtime, {.reader = reader}); }),
                  HasSubstr("what the model has is missing: output.weight"));
    });
  }
}

TEST_F(LoadWeightsTest, NotStrictReportsInstead) {
  nn::Llama plain = plain_model(false);
  Tensors values = values_of(plain);
  values.erase(values.begin());
  values.emplace_back("lm_head.weight", at::zeros({2}));
  save(values);
  for (const WeightsReader reader : kReaders) {
    sim::run_world(3, {}, [&](comm::Runtime& runtime) {
      nn::Llama model = sharded_model(false, runtime);
      {
        const at::NoGradGuard no_grad;
        model->tok_embeddings->parameters()[0].fill_(3);
      }
      const LoadReport report =
          load_weights(*model, path_, runtime, {.reader = reader, .strict = false});
      EXPECT_THAT(report.missing, ElementsAre("tok_embeddings.weight"));
      EXPECT_THAT(report.unknown, ElementsAre("lm_head.weight"));
      const at::NoGradGuard no_grad;
      EXPECT_TRUE(
          at::equal(dtensor::full_tensor(model->parameters()[0]), at::full({11, 10}, 3.0F)));
      EXPECT_TRUE(
          at::equal(dtensor::full_tensor(model->norm->parameters()[0]), plain->norm->weight));
    });
  }
}

TEST_F(LoadWeightsTest, AModelOnMetaIsRefused) {
  nn::Llama plain = plain_model(false);
  save(values_of(plain));
  nn::Llama model(small(false), at::kMeta);
  EXPECT_THAT(error_of([&] { load_weights(*model, path_, *comm::make_single_runtime()); }),
              HasSubstr("'tok_embeddings.weight' is on meta; call nn::to_empty"));
}

/// Parameters in other placements than fully_shard's, and buffers.
class PlacedImpl : public nn::Module {
 public:
  PlacedImpl(const mesh::DeviceMeshPtr& mesh, const at::Tensor& weight) {
    const auto placed = [&](const std::vector<Placement>& placements) {
      return dtensor::distribute_tensor(at::zeros_like(weight), mesh, placements);
    };
    register_parameter("columns", columns, placed({Placement::shard(1), Placement::replicate()}));
    register_parameter("both", both, placed({Placement::shard(1), Placement::shard(0)}));
    register_parameter("twice", twice, placed({Placement::shard(0), Placement::shard(0)}));
    register_parameter("plain", plain, at::zeros_like(weight));
    register_buffer("count", count, at::zeros({2}, at::kLong));
    register_buffer("table", table, at::zeros({2}), /*persistent=*/false);
  }
  at::Tensor columns, both, twice, plain, count, table;
};

TEST_F(LoadWeightsTest, AnyPlacementAndPersistentBuffers) {
  const at::Tensor weight = at::arange(35, at::kFloat).view({5, 7});
  const at::Tensor count = at::arange(2, at::kLong) + 4;
  save({{"columns", weight},
        {"both", weight + 1},
        {"twice", weight + 2},
        {"plain", weight + 3},
        {"count", count}});
  for (const WeightsReader reader : kReaders) {
    sim::run_world(6, {.schedule = sim::Schedule::kRandom}, [&](comm::Runtime& runtime) {
      PlacedImpl model(mesh::DeviceMesh::create(runtime, {2, 3}), weight);
      load_weights(model, path_, runtime, {.reader = reader});
      const at::NoGradGuard no_grad;
      EXPECT_TRUE(at::equal(dtensor::full_tensor(model.columns), weight));
      EXPECT_TRUE(at::equal(dtensor::full_tensor(model.both), weight + 1));
      EXPECT_TRUE(at::equal(dtensor::full_tensor(model.twice), weight + 2));
      EXPECT_TRUE(at::equal(model.plain, weight + 3));
      EXPECT_TRUE(at::equal(model.count, count));
    });
  }
}

}  // namespace
}  // namespace ppfsdp::checkpoint
