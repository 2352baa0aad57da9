// Clipping the gradients of Llama 2 7B: 291 parameters as one rank of 64 holds them (105 million
// elements in float32), and as one of so many that each shard is a row (where calls are all the
// cost). "plain" names the same on the local tensors.
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/stack.h>
#include <benchmark/benchmark.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "src/comm/single_runtime.h"
#include "src/dtensor/dtensor.h"
#include "src/mesh/device_mesh.h"
#include "src/optim/clip_grad_norm.h"

namespace ppfsdp::optim {
namespace {

using Tensors = std::vector<at::Tensor>;

/// Rows and columns (1 for vectors) of the parameters' shards over `ranks`.
std::vector<std::vector<int64_t>> llama2_7b(int64_t ranks) {
  constexpr int64_t kDim = 4096;
  constexpr int64_t kHidden = 11008;
  constexpr int64_t kVocab = 32000;
  std::vector<std::vector<int64_t>> sizes = {{kVocab, kDim}};
  for (int layer = 0; layer < 32; ++layer) {
    for (int i = 0; i < 4; ++i) sizes.push_back({kDim, kDim});
    sizes.insert(sizes.end(), {{kHidden, kDim}, {kDim, kHidden}, {kHidden, kDim}, {kDim}, {kDim}});
  }
  sizes.insert(sizes.end(), {{kDim}, {kVocab, kDim}});
  for (std::vector<int64_t>& own : sizes) {
    own[0] = (own[0] + ranks - 1) / ranks;
    // Rows that are cut short, where it is calls that are measured.
    if (ranks > kVocab) own.back() = std::min<int64_t>(own.back(), 16);
  }
  return sizes;
}

/// Parameters with gradients: DTensors on a mesh of one rank, or plain tensors.
struct Model {
  Model(int64_t ranks, bool sharded, at::ScalarType dtype) {
    const auto mesh = mesh::DeviceMesh::create(*runtime, {1});
    for (const std::vector<int64_t>& sizes : llama2_7b(ranks)) {
      at::Tensor gradient = (at::randn(sizes) * 1e-3).to(dtype);
      elements += gradient.numel();
      if (sharded) {
        gradient = dtensor::from_local(gradient, mesh, {dtensor::Placement::shard(0)});
      }
      gradients.push_back(gradient);
      // The value is no part of clipping; sharing it saves the memory.
      parameters.push_back(gradient.detach().requires_grad_());
      parameters.back().mutable_grad() = gradient;
    }
  }

  std::shared_ptr<comm::Runtime> runtime = comm::make_single_runtime();
  Tensors parameters;
  Tensors gradients;
  int64_t elements = 0;
};

enum Way : int64_t { kPlainLoop, kPlain, kForLoop, kForeach, kReproducible };

/// As one would write it by hand.
void clip_in_a_loop(const Tensors& gradients, double max_norm) {
  Tensors norms;
  for (const at::Tensor& gradient : gradients) norms.push_back(at::linalg_vector_norm(gradient, 2));
  const at::Tensor total = at::linalg_vector_norm(at::stack(norms), 2);
  const at::Tensor factor = at::clamp(max_norm / (total + 1e-6), std::nullopt, 1.0);
  for (const at::Tensor& gradient : gradients) gradient.mul_(factor);
}

NormOptions options_of(int64_t way) {
  return {.foreach = way != kForLoop, .reproducible = way == kReproducible};
}

/// The norm alone, or with clipping; `ranks`, Way.
void run(benchmark::State& state, bool clips, at::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  at::set_num_threads(1);
  const int64_t way = state.range(1);
  const Model model(state.range(0), way != kPlainLoop && way != kPlain, dtype);
  // No norm comes near it, so that gradients stay as they are.
  constexpr double kLarge = 1e30;
  for (auto _ : state) {
    if (way == kPlainLoop && clips) {
      clip_in_a_loop(model.gradients, kLarge);
    } else if (clips) {
      clip_grad_norm_(model.parameters, kLarge, options_of(way));
    } else {
      benchmark::DoNotOptimize(get_total_norm(model.gradients, options_of(way)));
    }
  }
  state.SetItemsProcessed(state.iterations() * model.elements);
}

void Clip(benchmark::State& state) { run(state, true, at::kFloat); }
void Norm(benchmark::State& state) { run(state, false, at::kFloat); }
void NormOfBFloat16(benchmark::State& state) { run(state, false, at::kBFloat16); }

constexpr int64_t kRowsOnly = 1 << 20;

BENCHMARK(Clip)
    ->ArgNames({"ranks", "way"})
    ->ArgsProduct({{64, kRowsOnly}, {kPlainLoop, kPlain, kForLoop, kForeach, kReproducible}})
    ->Unit(benchmark::kMicrosecond);
BENCHMARK(Norm)
    ->ArgNames({"ranks", "way"})
    ->ArgsProduct({{64, kRowsOnly}, {kPlain, kForeach, kReproducible}})
    ->Unit(benchmark::kMicrosecond);
BENCHMARK(NormOfBFloat16)
    ->ArgNames({"ranks", "way"})
    ->ArgsProduct({{64}, {kForeach, kReproducible}})
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace ppfsdp::optim

BENCHMARK_MAIN();
