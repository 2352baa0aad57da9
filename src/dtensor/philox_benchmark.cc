// Elements per second of the indexed mode on one thread, beside ATen's own generators.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <benchmark/benchmark.h>

#include "src/dtensor/philox_indexed.h"

namespace ppfsdp::dtensor {
namespace {

constexpr int64_t kCount = 1 << 20;

void indexed(benchmark::State& state, const Distribution& distribution, at::ScalarType dtype) {
  const at::Tensor out = at::empty({kCount}, dtype);
  for (auto _ : state) {
    fill_indexed_run(out, 0, distribution, 1, 0);
    benchmark::DoNotOptimize(out.const_data_ptr());
  }
  state.SetItemsProcessed(state.iterations() * kCount);
}
BENCHMARK_CAPTURE(indexed, uniform_float, Uniform{}, at::kFloat);
BENCHMARK_CAPTURE(indexed, uniform_bfloat16, Uniform{}, at::kBFloat16);
BENCHMARK_CAPTURE(indexed, uniform_double, Uniform{}, at::kDouble);
BENCHMARK_CAPTURE(indexed, normal_float, Normal{}, at::kFloat);
BENCHMARK_CAPTURE(indexed, normal_double, Normal{}, at::kDouble);
BENCHMARK_CAPTURE(indexed, bernoulli_float, Bernoulli{}, at::kFloat);
BENCHMARK_CAPTURE(indexed, random_int, (RandomInt{0, 1000}), at::kLong);

void aten_uniform(benchmark::State& state) {
  const at::Tensor out = at::empty({kCount}, at::kFloat);
  for (auto _ : state) {
    out.uniform_();
  }
  state.SetItemsProcessed(state.iterations() * kCount);
}
BENCHMARK(aten_uniform);

void aten_normal(benchmark::State& state) {
  const at::Tensor out = at::empty({kCount}, at::kFloat);
  for (auto _ : state) {
    out.normal_();
  }
  state.SetItemsProcessed(state.iterations() * kCount);
}
BENCHMARK(aten_normal);

}  // namespace
}  // namespace ppfsdp::dtensor

int main(int argc, char** argv) {
  at::set_num_threads(1);
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}
