// Random init of a sharded tensor beside that of the plain one. Items are the whole's elements, so
// a rank that does nothing twice is as fast as the plain op, and one that skips what others hold is
// faster.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <benchmark/benchmark.h>

#include <functional>
#include <string>
#include <vector>

#include "sim/mesh/world.h"
#include "src/dtensor/dtensor.h"

namespace ppfsdp::dtensor {
namespace {

constexpr int64_t kRows = 4096;
constexpr int64_t kColumns = 4096;

using Draw = std::function<void(at::Tensor tensor, const at::Generator& generator)>;

struct OpCase {
  const char* name;
  at::ScalarType dtype;
  Draw draw;
};

const std::vector<OpCase>& ops() {
  static const auto* all = new std::vector<OpCase>{
      {"normal_ float", at::kFloat,
       [](at::Tensor t, const at::Generator& g) { t.normal_(0, 1, g); }},
      {"normal_ bfloat16", at::kBFloat16,
       [](at::Tensor t, const at::Generator& g) { t.normal_(0, 1, g); }},
      {"uniform_ float", at::kFloat,
       [](at::Tensor t, const at::Generator& g) { t.uniform_(0, 1, g); }},
      {"bernoulli_ float", at::kFloat,
       [](at::Tensor t, const at::Generator& g) { t.bernoulli_(0.9, g); }},
  };
  return *all;
}

void plain(benchmark::State& state, const OpCase& op) {
  const at::Tensor tensor = at::empty({kRows, kColumns}, op.dtype);
  const at::Generator generator = at::detail::createCPUGenerator(1);
  for (auto _ : state) {
    op.draw(tensor, generator);
  }
  state.SetItemsProcessed(state.iterations() * tensor.numel());
}

/// The middle rank of eight draws its part.
void sharded(benchmark::State& state, const OpCase& op, int64_t dim) {
  sim::run_world(8, {}, [&](comm::Runtime& runtime) {
    const auto mesh = mesh::DeviceMesh::create(runtime, {8});
    if (runtime.rank() != 4) {
      return;
    }
    std::vector<int64_t> local = {kRows, kColumns};
    local[dim] /= 8;
    const at::Tensor tensor = from_local(at::empty(local, op.dtype), mesh, {Placement::shard(dim)});
    const at::Generator generator = at::detail::createCPUGenerator(1);
    for (auto _ : state) {
      op.draw(tensor, generator);
    }
    state.SetItemsProcessed(state.iterations() * tensor.numel());
  });
}

void add_all() {
  for (const OpCase& op : ops()) {
    const std::string name = op.name;
    benchmark::RegisterBenchmark((name + ", plain").c_str(),
                                 [&op](benchmark::State& state) { plain(state, op); });
    for (const int64_t dim : {0, 1}) {
      benchmark::RegisterBenchmark(
          (name + ", Shard(" + std::to_string(dim) + ") of 8").c_str(),
          [&op, dim](benchmark::State& state) { sharded(state, op, dim); });
    }
  }
}

}  // namespace
}  // namespace ppfsdp::dtensor

int main(int argc, char** argv) {
  at::set_num_threads(1);
  ppfsdp::dtensor::add_all();
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
