#include "src/nn/to_empty.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <vector>

#include "sim/mesh/world.h"
#include "src/dtensor/dtensor.h"
#include "src/mesh/device_mesh.h"
#include "src/nn/linear.h"
#include "src/nn/llama.h"
#include "src/nn/module.h"

namespace ppfsdp::nn {
namespace {

using dtensor::Placement;

LlamaConfig small(bool tied) {
  return {.vocab_size = 11,
          .dim = 12,
          .n_layers = 2,
          .n_heads = 2,
          .hidden_dim = 5,
          .max_seq_len = 8,
          .tied_output = tied};
}

at::Tensor generator_state() { return at::detail::getDefaultCPUGenerator().get_state(); }

bool same_tensors(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!a[i].is_same(b[i])) return false;
  }
  return true;
}

// What the optimizer, the slots and a tie hold must be what has the memory.
TEST(ToEmpty, TensorsStayTheObjectsThatTheyAre) {
  Llama model(small(/*tied=*/true), at::kMeta);
  model->norm->weight.set_requires_grad(false);
  const std::vector<at::Tensor> parameters = model->parameters(), buffers = model->buffers();
  to_empty(*model, at::kCPU);
  EXPECT_TRUE(same_tensors(model->parameters(), parameters));
  EXPECT_TRUE(same_tensors(model->buffers(), buffers));
  EXPECT_TRUE(model->output->weight.is_same(model->tok_embeddings->weight));
  EXPECT_TRUE(model->table.is_same(buffers[0]));
  EXPECT_EQ(model->table.scalar_type(), at::kComplexFloat);
  Llama plain(small(true));
  const std::vector<at::Tensor> expected = plain->parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_TRUE(parameters[i].is_cpu());
    EXPECT_EQ(parameters[i].sizes(), expected[i].sizes());
    EXPECT_EQ(parameters[i].strides(), expected[i].strides());
    EXPECT_EQ(parameters[i].storage().nbytes(), expected[i].nbytes());
    EXPECT_EQ(parameters[i].requires_grad(), !parameters[i].is_same(model->norm->weight));
    EXPECT_TRUE(parameters[i].is_leaf());
  }
}

// One path for both: the draws come in the same order, and as many, or every later random number
// would be another.
TEST(ToEmpty, ResetGivesWhatTheConstructorGives) {
  for (const bool tied : {false, true}) {
    Llama model(small(tied), at::kMeta);
    to_empty(*model, at::kCPU);
    at::manual_seed(3);
    reset_all_parameters(*model);
    const at::Tensor after_reset = generator_state();
    at::manual_seed(3);
    Llama plain(small(tied));
    EXPECT_TRUE(at::equal(generator_state(), after_reset));
    const auto got = model->parameters(), expected = plain->parameters();
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::equal(got[i], expected[i])) << i;
    EXPECT_TRUE(at::equal(model->table, plain->table)) << "buffers are recomputed";
  }
  Linear model(3, 4, LinearImpl::Options{.tensor = at::kMeta});
  to_empty(*model, at::kCPU);
  at::manual_seed(3);
  reset_all_parameters(*model);
  at::manual_seed(3);
  Linear plain(3, 4);
  EXPECT_TRUE(at::equal(model->weight, plain->weight));
  EXPECT_TRUE(at::equal(model->bias, plain->bias));
}

// Building on meta must not draw, or a model built in the usual way afterwards would differ.
TEST(ToEmpty, BuildingOnMetaLeavesTheGeneratorAlone) {
  const at::Tensor before = generator_state();
  Llama model(small(false), at::kMeta);
  EXPECT_TRUE(at::equal(generator_state(), before));
}

// A graph on meta, for shape inference say, leaves accumulators that know the meta device.
TEST(ToEmpty, GradientsFollowToTheNewDevice) {
  Linear model(3, 4, LinearImpl::Options{.tensor = at::kMeta});
  const at::Tensor shape = model(at::empty({2, 3}, at::kMeta));
  EXPECT_EQ(shape.sizes(), (at::IntArrayRef{2, 4}));
  shape.sum().backward();
  EXPECT_TRUE(model->weight.grad().is_meta());
  to_empty(*model, at::kCPU);
  EXPECT_FALSE(model->weight.grad().defined());
  reset_all_parameters(*model);
  model(at::ones({2, 3})).sum().backward();
  EXPECT_TRUE(at::equal(model->weight.grad(), at::full({4, 3}, 2.0)));
}

// Modules of LibTorch's own have no slots and need none: their members are the same tensors.
TEST(ToEmpty, AlsoOfLibTorchsModulesAndBackToMeta) {
  torch::nn::Linear model(3, 4);
  to_empty(*model, at::kMeta);
  EXPECT_TRUE(model->weight.is_meta());
  EXPECT_EQ(model->weight.storage().data(), nullptr);
  to_empty(*model, at::kCPU);
  {
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : model->parameters()) parameter.fill_(1);
  }
  EXPECT_TRUE(at::equal(model(at::ones({1, 3})), at::full({1, 4}, 4.0)));
}

TEST(ToEmpty, WithoutRecurseOnlyTheModulesOwn) {
  Llama model(small(false), at::kMeta);
  to_empty(*model, at::kCPU, /*recurse=*/false);
  EXPECT_TRUE(model->table.is_cpu());
  for (const at::Tensor& parameter : model->parameters()) EXPECT_TRUE(parameter.is_meta());
}

class ShardedImpl : public Module {
 public:
  explicit ShardedImpl(const mesh::DeviceMeshPtr& mesh, const Placement& placement) {
    const at::Tensor local = at::empty({placement.is_shard() ? 2 : 6, 3}, at::kMeta);
    register_parameter("weight", weight, dtensor::from_local(local, mesh, {placement}));
    register_buffer("table", table, at::empty({5}, at::kMeta));
  }
  at::Tensor weight, table;
};

// Memory that is forgotten afterwards must show, and a rank gets its part alone.
TEST(ToEmpty, DTensorsKeepTheirSpecsAndArePoisonedOnTheSimulatedMesh) {
  sim::run_world(3, {}, [](comm::Runtime& runtime) {
    const auto mesh = mesh::DeviceMesh::create(runtime, {3});
    for (const Placement& placement : {Placement::shard(0), Placement::replicate()}) {
      ShardedImpl model(mesh, placement);
      const dtensor::SpecPtr spec = dtensor::spec_of(model.weight);
      const at::Tensor before = model.weight;
      to_empty(model, at::kCPU);
      EXPECT_TRUE(model.weight.is_same(before));
      EXPECT_TRUE(model.weight.requires_grad());
      EXPECT_FALSE(model.weight.is_meta());
      EXPECT_EQ(dtensor::spec_of(model.weight), spec);
      const at::Tensor& local = dtensor::local_of(model.weight);
      EXPECT_EQ(local.sizes(), at::IntArrayRef(spec->local_sizes));
      EXPECT_EQ(local.storage().nbytes(), local.nbytes());
      EXPECT_TRUE(local.isnan().all().item<bool>());
      EXPECT_TRUE(model.table.isnan().all().item<bool>());
      const at::NoGradGuard no_grad;
      model.weight.fill_(2);
      EXPECT_TRUE(at::equal(dtensor::full_tensor(model.weight), at::full({6, 3}, 2.0)));
    }
  });
}

TEST(ToEmpty, ADTensorIsNotReplacedByAPlainTensor) {
  sim::run_world(1, {}, [](comm::Runtime& runtime) {
    ShardedImpl model(mesh::DeviceMesh::create(runtime, {1}), Placement::replicate());
    EXPECT_THROW(replace_data(model.weight, at::ones({6, 3})), c10::Error);
  });
}

}  // namespace
}  // namespace ppfsdp::nn
