// What an op on a DTensor costs beside the same op on its local part.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <benchmark/benchmark.h>
#include <c10/core/GradMode.h>

#include "src/comm/single_runtime.h"
#include "src/dtensor/dtensor.h"

namespace ppfsdp::dtensor {
namespace {

using Tensors = std::vector<at::Tensor>;

struct Fixture {
  static Fixture& get() {
    static auto* fixture = new Fixture;
    return *fixture;
  }

  at::Tensor make(bool sharded) const {
    const at::Tensor local = at::ones({64});
    return sharded ? from_local(local, mesh, {Placement::shard(0)}) : local;
  }
  Tensors list(bool sharded) const {
    Tensors tensors;
    for (int i = 0; i < 100; ++i) {
      tensors.push_back(make(sharded));
    }
    return tensors;
  }

  std::shared_ptr<comm::Runtime> runtime = comm::make_single_runtime();
  mesh::DeviceMeshPtr mesh = mesh::DeviceMesh::create(*runtime, {1});
};

/// Argument 0: plain; 1: a DTensor.
template <typename Op>
void one(benchmark::State& state, const Op& op) {
  const c10::NoGradGuard no_grad;
  const at::Tensor a = Fixture::get().make(state.range(0) == 1);
  const at::Tensor b = Fixture::get().make(state.range(0) == 1);
  for (auto _ : state) {
    op(a, b);
  }
}

template <typename Op>
void lists(benchmark::State& state, const Op& op) {
  const c10::NoGradGuard no_grad;
  const Tensors a = Fixture::get().list(state.range(0) == 1);
  const Tensors b = Fixture::get().list(state.range(0) == 1);
  for (auto _ : state) {
    op(a, b);
  }
}

using T = at::Tensor;
using L = Tensors;

BENCHMARK_CAPTURE(one, mul_, [](const T& a, const T& b) { a.mul_(b); })->Arg(0)->Arg(1);
BENCHMARK_CAPTURE(one, mul_scalar_, [](const T& a, const T&) { a.mul_(1.0); })->Arg(0)->Arg(1);
BENCHMARK_CAPTURE(one, add, [](const T& a, const T& b) { a.add(b); })->Arg(0)->Arg(1);
BENCHMARK_CAPTURE(one, add_, [](const T& a, const T& b) { a.add_(b, 0); })->Arg(0)->Arg(1);
BENCHMARK_CAPTURE(one, view, [](const T& a, const T&) { a.view({8, 8}); })->Arg(0)->Arg(1);
BENCHMARK_CAPTURE(one, detach, [](const T& a, const T&) { a.detach(); })->Arg(0)->Arg(1);
BENCHMARK_CAPTURE(one, cat, [](const T& a, const T& b) { at::cat({a, b}); })->Arg(0)->Arg(1);
BENCHMARK_CAPTURE(lists, foreach_mul_100, [](const L& a, const L& b) { at::_foreach_mul_(a, b); })
    ->Arg(0)
    ->Arg(1);
BENCHMARK_CAPTURE(lists, foreach_mul_scalar_100,
                  [](const L& a, const L&) { at::_foreach_mul_(a, 1.0); })
    ->Arg(0)
    ->Arg(1);
BENCHMARK_CAPTURE(lists, foreach_addcdiv_100,
                  [](const L& a, const L& b) { at::_foreach_addcdiv_(a, b, b, 0.0); })
    ->Arg(0)
    ->Arg(1);
BENCHMARK_CAPTURE(lists, foreach_norm_100, [](const L& a, const L&) { at::_foreach_norm(a); })
    ->Arg(0)
    ->Arg(1);

}  // namespace
}  // namespace ppfsdp::dtensor

int main(int argc, char** argv) {
  at::set_num_threads(1);
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
