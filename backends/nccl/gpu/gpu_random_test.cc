// Random values in shards on a GPU are those that the whole tensor gets there.
#include <ATen/core/Generator.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "backends/nccl/gpu/loopback.h"
#include "backends/nccl/gpu/testing.h"
#include "src/comm/testing/values.h"
#include "src/dtensor/dtensor.h"
#include "src/fsdp/fully_shard.h"
#include "src/mesh/device_mesh.h"
#include "src/nn/llama.h"
#include "src/nn/to_empty.h"

namespace ppfsdp::nccl::testing {
namespace {

using comm::testing::difference_in_bits;
using dtensor::Placement;

struct Draw {
  const char* name;
  std::function<void(at::Tensor&, const at::Generator&)> fill;
};

const std::vector<Draw> kDraws = {
    {"normal_", [](at::Tensor& t, const at::Generator& from) { t.normal_(0.5, 2, from); }},
    {"uniform_", [](at::Tensor& t, const at::Generator& from) { t.uniform_(-1, 2, from); }},
    {"bernoulli_", [](at::Tensor& t, const at::Generator& from) { t.bernoulli_(0.3, from); }},
    {"exponential_", [](at::Tensor& t, const at::Generator& from) { t.exponential_(1.5, from); }},
    {"random_", [](at::Tensor& t, const at::Generator& from) { t.random_(0, 100, from); }},
};

/// The generator in a state that is not its first.
void restart(at::Generator& generator) {
  generator.set_current_seed(7);
  generator.set_offset(12);
}

// A rank that draws its part as if it were the whole, or from another place in the sequence; a
// generator that ends elsewhere, so that what is drawn next differs.
TEST(GpuRandom, ShardsAreThePartsOfTheWhole) {
  // One element a thread, several rounds of the whole grid, an uneven last one, one row.
  const std::vector<std::vector<int64_t>> all_sizes = {
      {5, 7}, {3000, 1001}, {8, 300000}, {1, 5000}};
  run_gpus(1, [&](NcclRuntime& runtime) {
    at::Generator generator = runtime.default_generator();
    const auto check = [&](const Draw& draw, at::ScalarType dtype,
                           const std::vector<int64_t>& sizes) {
      const at::TensorOptions options = at::TensorOptions(runtime.device()).dtype(dtype);
      at::Tensor whole = at::empty(sizes, options);
      restart(generator);
      draw.fill(whole, generator);
      const uint64_t end = generator.get_offset();
      for (const auto& [dim, ranks, rank] :
           {std::tuple(0, 2, 0), {0, 3, 1}, {0, 8, 7}, {1, 4, 2}}) {
        Loopback loopback(runtime, rank, ranks);
        const auto mesh = mesh::DeviceMesh::create(loopback, {ranks});
        const dtensor::ShardRange range = dtensor::shard_range(sizes[dim], ranks, rank);
        const at::Tensor wanted = whole.narrow(dim, range.offset, range.length).contiguous();
        at::Tensor tensor = dtensor::from_local(at::empty(wanted.sizes(), options), mesh,
                                                {Placement::shard(dim)}, at::IntArrayRef(sizes));
        restart(generator);
        draw.fill(tensor, generator);
        const std::string what =
            fmt::format("{} into {} of [{}, {}], shard {} of {} of dim {}", draw.name,
                        c10::toString(dtype), sizes[0], sizes[1], rank, ranks, dim);
        EXPECT_EQ(difference_in_bits(dtensor::local_of(tensor).cpu(), wanted.cpu()), "") << what;
        EXPECT_EQ(generator.get_offset(), end) << what;
      }
    };
    for (const Draw& draw : kDraws) {
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
        for (const std::vector<int64_t>& sizes : all_sizes) check(draw, dtype, sizes);
      }
    }
  });
}

// A sharded model would start as another model, depending on the number of ranks.
TEST(GpuRandom, AShardedModelStartsAsTheWholeOne) {
  const nn::LlamaConfig config = {.vocab_size = 515,
                                  .dim = 256,
                                  .n_layers = 2,
                                  .n_heads = 4,
                                  .hidden_dim = 700,
                                  .max_seq_len = 16};
  run_gpus(1, [&](NcclRuntime& runtime) {
    at::Generator generator = runtime.default_generator();
    const auto initialize = [&](nn::Llama& model) {
      nn::to_empty(*model, runtime.device());
      restart(generator);
      nn::reset_all_parameters(*model);
    };
    nn::Llama whole(config, at::kMeta);
    initialize(whole);
    const auto expected = whole->named_parameters();
    for (const auto& [ranks, rank] : {std::pair(1, 0), {2, 1}, {3, 0}, {8, 5}}) {
      Loopback loopback(runtime, rank, ranks);
      const auto mesh = mesh::DeviceMesh::create(loopback, {ranks});
      nn::Llama model(config, at::kMeta);
      for (nn::LlamaBlock& block : model->blocks()) fsdp::fully_shard(*block, {.mesh = mesh});
      fsdp::fully_shard(*model, {.mesh = mesh});
      initialize(model);
      for (const auto& item : model->named_parameters()) {
        const at::Tensor& full = expected[item.key()];
        const dtensor::ShardRange range = dtensor::shard_range(full.size(0), ranks, rank);
        EXPECT_EQ(difference_in_bits(dtensor::local_of(item.value()).cpu(),
                                     full.narrow(0, range.offset, range.length).cpu()),
                  "")
            << item.key() << ", rank " << rank << " of " << ranks;
      }
    }
  });
}

}  // namespace
}  // namespace ppfsdp::nccl::testing
