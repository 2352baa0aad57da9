// Two processes on one machine: the operations of this backend beside ProcessGroupGloo's own.
// Arguments are bytes of a rank's part (of an all-reduce: of the tensor). Every benchmark runs a
// fixed number of iterations, so that both processes run in step; rank 0 reports.
//
//     bazel run -c opt //backends/gloo:gloo_benchmark
#include <ATen/Parallel.h>
#include <ATen/ops/full.h>
#include <benchmark/benchmark.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "backends/gloo/gloo.h"
#include "backends/gloo/testing/thread_world.h"
#include "src/comm/communicator.h"

namespace ppfsdp::gloo {
namespace {

constexpr int kRanks = 2;

std::unique_ptr<comm::Runtime> runtime;
c10::intrusive_ptr<c10d::ProcessGroupGloo> native;

/// A rank's part, and a tensor of all parts.
struct Tensors {
  explicit Tensors(const benchmark::State& state)
      : part(at::full({state.range(0) / 4}, 1.0)), whole(at::full({kRanks * part.numel()}, 1.0)) {}
  at::Tensor part;
  at::Tensor whole;
  at::Tensor slot() const { return whole.narrow(0, runtime->rank() * part.numel(), part.numel()); }
};

template <typename Fn>
void measure(benchmark::State& state, const Fn& fn) {
  // Both past the check of the first calls and the growth of socket buffers.
  for (int i = 0; i < 8; ++i) fn();
  std::vector<double> times;
  for (auto unused : state) {
    const auto start = std::chrono::steady_clock::now();
    fn();
    times.push_back(
        std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
            .count());
  }
  // On a shared machine the mean is that of the scheduler's time slices.
  std::sort(times.begin(), times.end());
  state.counters["median_us"] = times[times.size() / 2];
  state.counters["p90_us"] = times[times.size() * 9 / 10];
}

void all_gather(benchmark::State& state) {
  const Tensors tensors(state);
  const at::Tensor slot = tensors.slot();
  measure(state, [&] {
    runtime->world()->all_gather_into(tensors.whole, slot, runtime->compute_stream());
  });
}

void native_all_gather(benchmark::State& state) {
  Tensors tensors(state);
  at::Tensor slot = tensors.slot();
  measure(state, [&] { native->_allgather_base(tensors.whole, slot)->wait(); });
}

void reduce_scatter(benchmark::State& state) {
  const Tensors tensors(state);
  measure(state, [&] {
    runtime->world()->reduce_scatter(tensors.part, tensors.whole, comm::ReduceOp::avg(),
                                     runtime->compute_stream());
  });
}

void native_reduce_scatter(benchmark::State& state) {
  Tensors tensors(state);
  c10d::ReduceScatterOptions options;
  options.reduceOp = c10d::ReduceOp::AVG;
  measure(state,
          [&] { native->_reduce_scatter_base(tensors.part, tensors.whole, options)->wait(); });
}

void all_reduce(benchmark::State& state) {
  const Tensors tensors(state);
  measure(state, [&] {
    runtime->world()->all_reduce(tensors.part, comm::ReduceOp::avg(), runtime->compute_stream());
  });
}

void native_all_reduce(benchmark::State& state) {
  const Tensors tensors(state);
  std::vector<at::Tensor> argument = {tensors.part};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::AVG;
  measure(state, [&] { native->allreduce(argument, options)->wait(); });
}

void barrier(benchmark::State& state) {
  measure(state, [] { runtime->world()->barrier(); });
}

/// What the rank's thread pays to issue an operation on a side stream, its wait aside.
void issue(benchmark::State& state) {
  const Tensors tensors(state);
  const at::Tensor slot = tensors.slot();
  const auto stream = runtime->create_stream("side", comm::StreamPriority::kHigh);
  for (auto unused : state) {
    runtime->world()->all_gather_into(tensors.whole, slot, *stream);
    const comm::EventPtr event = stream->record();
    state.PauseTiming();
    runtime->compute_stream().wait(event);
    state.ResumeTiming();
  }
}

void small_and_large(benchmark::internal::Benchmark* benchmark) {
  benchmark->UseRealTime()->Unit(benchmark::kMicrosecond);
  for (const int64_t bytes : {1 << 10, 16 << 10, 64 << 10}) benchmark->Arg(bytes);
  benchmark->Arg(1 << 20)->Arg(5 << 20)->Iterations(300);
}

BENCHMARK(all_gather)->Apply(small_and_large);
BENCHMARK(native_all_gather)->Apply(small_and_large);
BENCHMARK(reduce_scatter)->Apply(small_and_large);
BENCHMARK(native_reduce_scatter)->Apply(small_and_large);
BENCHMARK(all_reduce)->Apply(small_and_large);
BENCHMARK(native_all_reduce)->Apply(small_and_large);
BENCHMARK(barrier)->UseRealTime()->Unit(benchmark::kMicrosecond)->Iterations(1000);
BENCHMARK(issue)->Arg(64 << 10)->Unit(benchmark::kMicrosecond)->Iterations(300);

c10::intrusive_ptr<c10d::ProcessGroupGloo> make_native(int rank, int port, int listen_fd) {
  c10d::TCPStoreOptions settings;
  settings.port = static_cast<uint16_t>(port);
  settings.isServer = rank == 0;
  settings.waitWorkers = false;
  if (rank == 0) settings.masterListenFd = listen_fd;
  const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", settings);
  auto options = c10d::ProcessGroupGloo::Options::create(std::chrono::seconds(60));
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, kRanks, options);
}

}  // namespace
}  // namespace ppfsdp::gloo

int main(int argc, char** argv) {
  using namespace ppfsdp::gloo;
  GlooOptions options;
  options.world_size = kRanks;
  options.checked = 16;
  options.listen_fd = testing::listen_on_free_port(options.master_port);
  int native_port = 0;
  const int native_fd = testing::listen_on_free_port(native_port);
  const pid_t child = fork();
  options.rank = child == 0 ? 1 : 0;
  at::set_num_threads(1);
  benchmark::Initialize(&argc, argv);
  runtime = make_runtime(options);
  native = make_native(options.rank, native_port, native_fd);
  if (child == 0) {
    std::ofstream nowhere("/dev/null");
    benchmark::ConsoleReporter silent;
    silent.SetOutputStream(&nowhere);
    silent.SetErrorStream(&nowhere);
    benchmark::RunSpecifiedBenchmarks(&silent);
  } else {
    benchmark::RunSpecifiedBenchmarks();
  }
  runtime->world()->barrier();
  native.reset();
  runtime.reset();
  if (child != 0) waitpid(child, nullptr, 0);
  return 0;
}
