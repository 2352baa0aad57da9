// What simulating costs beyond the ranks' own work. Times are a rank's: of one call on one rank.
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <benchmark/benchmark.h>

#include <chrono>
#include <functional>

#include "sim/mesh/world.h"
#include "src/comm/communicator.h"

namespace ppfsdp::sim {
namespace {

using Clock = std::chrono::steady_clock;

/// Runs `step` on every rank `kSteps` times; an iteration's time is one step of one rank.
void measure(benchmark::State& state, int n, Schedule schedule,
             const std::function<std::function<void()>(comm::Runtime&)>& make_step) {
  constexpr int kSteps = 50;
  for (auto _ : state) {
    Clock::time_point start;
    double seconds = 0;
    run_world(n, {.seed = 1, .schedule = schedule}, [&](comm::Runtime& runtime) {
      const auto step = make_step(runtime);
      step();
      runtime.world()->barrier();
      if (runtime.rank() == 0) start = Clock::now();
      for (int i = 0; i < kSteps; ++i) step();
      runtime.world()->barrier();
      seconds = std::chrono::duration<double>(Clock::now() - start).count();
    });
    state.SetIterationTime(seconds / kSteps / n);
  }
}

/// Ranks and threads made and ended.
void BM_World(benchmark::State& state) {
  for (auto _ : state) {
    run_world(static_cast<int>(state.range(0)), {}, [](comm::Runtime&) {});
  }
}
BENCHMARK(BM_World)->Arg(1)->Arg(8)->Arg(64)->Arg(256)->Unit(benchmark::kMicrosecond);

/// One hand-over from thread to thread, and the bookkeeping of a collective.
void BM_Barrier(benchmark::State& state) {
  measure(state, static_cast<int>(state.range(0)), Schedule::kLazy,
          [](comm::Runtime& runtime) -> std::function<void()> {
            return [&runtime] { runtime.world()->barrier(); };
          });
}
BENCHMARK(BM_Barrier)
    ->Arg(2)
    ->Arg(8)
    ->Arg(64)
    ->Arg(256)
    ->Iterations(5)
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);

/// A closure queued on a side stream, run there, and waited for.
void BM_Closure(benchmark::State& state) {
  measure(state, 8, static_cast<Schedule>(state.range(0)),
          [](comm::Runtime& runtime) -> std::function<void()> {
            const auto stream = runtime.create_stream("side", comm::StreamPriority::kNormal);
            return [&runtime, stream] {
              stream->run([] {});
              runtime.compute_stream().wait(stream->record());
            };
          });
}
BENCHMARK(BM_Closure)
    ->Arg(0)
    ->Arg(1)
    ->Arg(2)
    ->ArgName("schedule")
    ->Iterations(5)
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);

/// `n` ranks gather a buffer of `bytes` each.
void BM_AllGather(benchmark::State& state) {
  const int n = static_cast<int>(state.range(0));
  const int64_t numel = state.range(1) / 4 / n;
  measure(state, n, Schedule::kLazy, [&](comm::Runtime& runtime) -> std::function<void()> {
    const auto stream = runtime.create_stream("gather", comm::StreamPriority::kHigh);
    const at::Tensor output = at::ones({numel * n});
    const at::Tensor input = output.narrow(0, runtime.rank() * numel, numel);
    return [=, &runtime] {
      runtime.world()->all_gather_into(output, input, *stream);
      runtime.compute_stream().wait(stream->record());
    };
  });
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations()) * numel * n * 4);
}
BENCHMARK(BM_AllGather)
    ->ArgsProduct({{8, 64, 256}, {1 << 16, 1 << 20}})
    ->Iterations(5)
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);

/// `n` ranks reduce a buffer of `bytes` each.
void BM_ReduceScatter(benchmark::State& state) {
  const int n = static_cast<int>(state.range(0));
  const at::ScalarType dtype = state.range(2) == 4 ? at::kFloat : at::kBFloat16;
  const int64_t numel = state.range(1) / state.range(2) / n;
  measure(state, n, Schedule::kLazy, [&](comm::Runtime& runtime) -> std::function<void()> {
    const auto stream = runtime.create_stream("reduce", comm::StreamPriority::kHigh);
    const at::Tensor output = at::empty({numel}, dtype);
    const at::Tensor input = at::ones({numel * n}, dtype);
    return [=, &runtime] {
      runtime.world()->reduce_scatter(output, input, comm::ReduceOp::avg(), *stream);
      runtime.compute_stream().wait(stream->record());
    };
  });
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations()) * state.range(1));
}
BENCHMARK(BM_ReduceScatter)
    ->ArgsProduct({{8, 64, 256}, {1 << 16, 1 << 20}, {4, 2}})
    ->ArgNames({"ranks", "bytes", "itemsize"})
    ->Iterations(5)
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace ppfsdp::sim

BENCHMARK_MAIN();
