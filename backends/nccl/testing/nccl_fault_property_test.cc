// Whatever goes wrong wherever: all ranks fail or none does, none hangs (which ends this process),
// what is there without a fault is right, and nothing is left over or misused.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "backends/nccl/testing/thread_world.h"
#include "src/comm/communicator.h"

namespace ppfsdp::nccl::testing {
namespace {

using comm::ReduceOp;
using std::chrono::milliseconds;

enum class Mishap {
  kNone,
  kFails,
  kFailsLater,
  kNeverDone,
  kInProgress,
  kThrows,       // the rank's own code
  kProcessEnds,  // and nobody says why
};

struct Step {
  int kind = 0;
  int stream = 0;     // 0: compute
  bool half = false;  // of the world
  int64_t numel = 0;
};

struct Case {
  int world = 2;
  std::vector<Step> steps;
  Mishap mishap = Mishap::kNone;
  int rank = 0;     // whose mishap it is
  uint64_t at = 0;  // the how-many-th step, or call of NCCL for an operation
  ThreadWorldOptions options;

  std::string str() const {
    std::vector<std::string> texts;
    for (const Step& step : steps) {
      texts.push_back(
          fmt::format("{}{}{}:{}", step.kind, step.half ? "h" : "w", step.stream, step.numel));
    }
    return fmt::format(
        "world={} steps=[{}] mishap={} rank={} at={} late={} seed={} checked={} "
        "polls={}",
        world, fmt::join(texts, " "), static_cast<int>(mishap), rank, at, options.devices.late,
        options.devices.seed, options.settings.checked, options.polls);
  }
};

int draw(int low, int high) { return *rc::gen::inRange(low, high + 1); }

Case draw_case() {
  Case c;
  c.world = draw(2, 5);
  for (int count = draw(1, 20); count > 0; --count) {
    c.steps.push_back({draw(0, 7), draw(0, 2), draw(0, 2) == 0, draw(0, 9)});
  }
  c.mishap = static_cast<Mishap>(draw(0, 6));
  c.rank = draw(0, c.world - 1);
  c.at = static_cast<uint64_t>(draw(0, static_cast<int>(c.steps.size()) - 1));
  c.options.devices.late = draw(0, 1) == 0;
  c.options.devices.seed = static_cast<uint64_t>(draw(0, 1000));
  c.options.polls = draw(0, 3);
  Settings& settings = c.options.settings;
  settings.checked = std::vector<uint64_t>{0, 4, 256}[static_cast<size_t>(draw(0, 2))];
  settings.poll = milliseconds(5);
  settings.report = milliseconds(10);
  // Short only where a fault ends by it, so that a slow machine is no fault.
  settings.timeout = milliseconds(c.mishap == Mishap::kNeverDone ? 300 : 40000);
  settings.silence = milliseconds(c.mishap == Mishap::kProcessEnds ? 300 : 40000);
  return c;
}

/// One rank's way through the steps. Every value that moves says whose it is.
class Walker {
 public:
  Walker(const Case& c, NcclRuntime& runtime)
      : case_(c),
        runtime_(runtime),
        side_{runtime.create_stream("one", comm::StreamPriority::kHigh),
              runtime.create_stream("two", comm::StreamPriority::kNormal)} {
    std::vector<int> members;
    for (int rank = runtime.rank() % 2; rank < c.world; rank += 2) members.push_back(rank);
    half_ = runtime.world()->subgroup(members, "half");
  }

  void walk() {
    for (uint64_t i = 0; i < case_.steps.size(); ++i) {
      if (case_.rank == runtime_.rank() && case_.at == i) {
        if (case_.mishap == Mishap::kThrows) throw comm::CommError("the rank gives up");
        if (case_.mishap == Mishap::kProcessEnds) throw ProcessEnds();
      }
      take(case_.steps[i]);
    }
    for (const auto& stream : side_) runtime_.compute_stream().wait(stream->record());
    runtime_.world()->barrier();
    runtime_.compute_stream().synchronize();
    for (const auto& check : checks_) check();
  }

 private:
  void take(const Step& step) {
    comm::Stream& stream =
        step.stream == 0 ? runtime_.compute_stream() : *side_[static_cast<size_t>(step.stream - 1)];
    comm::Communicator& group = step.half ? *half_ : *runtime_.world();
    const int n = group.size(), me = group.rank();
    const int64_t numel = step.numel;
    int sum = 0;
    for (const int rank : group.ranks()) sum += rank + 1;
    const at::Tensor mine = at::full({numel}, 1.0 + runtime_.rank());
    const auto expect = [&](const at::Tensor& got, double value) {
      checks_.push_back([got, value, text = case_.str()] {
        if (!got.equal(at::full_like(got, value)))
          throw std::runtime_error("wrong values: " + text);
      });
    };
    stream.wait(runtime_.compute_stream().record());
    switch (step.kind) {
      case 0: {
        const at::Tensor all = at::empty({n * numel});
        group.all_gather_into(all, mine, stream);
        for (int rank = 0; rank < n; ++rank) {
          expect(all.narrow(0, rank * numel, numel), 1.0 + group.ranks()[rank]);
        }
        return;
      }
      case 1: {
        const at::Tensor input = at::full({n * numel}, 1.0 + runtime_.rank());
        const at::Tensor part = at::empty({numel});
        group.reduce_scatter(part, input, ReduceOp::sum(), stream);
        return expect(part, sum);
      }
      case 2:
        group.all_reduce(mine, ReduceOp::premul_sum(2), stream);
        return expect(mine, 2.0 * sum);
      case 3:
        group.broadcast(mine, n - 1, stream);
        return expect(mine, 1.0 + group.ranks()[n - 1]);
      case 4: {
        const at::Tensor from = at::full({n * numel}, 1.0 + runtime_.rank());
        const at::Tensor to = at::empty({n * numel});
        group.all_to_all(to, from, {}, {}, stream);
        for (int rank = 0; rank < n; ++rank) {
          expect(to.narrow(0, rank * numel, numel), 1.0 + group.ranks()[rank]);
        }
        return;
      }
      case 5: {
        // Round the ring; on the compute stream every send would wait for its receive.
        if (n == 1 || step.stream == 0) return;
        const at::Tensor got = at::empty({numel});
        group.send(mine, (me + 1) % n, stream);
        group.recv(got, (me + n - 1) % n, stream);
        return expect(got, 1.0 + group.ranks()[(me + n - 1) % n]);
      }
      case 6:
        return group.barrier();
      default: {
        const at::Tensor memory = group.allocate(numel, at::kFloat, stream);
        stream.run([&] { memory.fill_(1.0); });
        group.all_reduce(memory, ReduceOp::sum(), stream);
        return expect(memory, n);
      }
    }
  }

  const Case& case_;
  NcclRuntime& runtime_;
  const std::vector<std::shared_ptr<comm::Stream>> side_;
  comm::CommunicatorPtr half_;
  std::vector<std::function<void()>> checks_;
};

void inject(const Case& c, FakeNccl& nccl) {
  static const std::vector<NcclFault::Kind> kKinds = {
      NcclFault::Kind::kFails, NcclFault::Kind::kFailsLater, NcclFault::Kind::kNeverDone,
      NcclFault::Kind::kInProgress};
  if (c.mishap == Mishap::kNone || c.mishap > Mishap::kInProgress) return;
  NcclFault fault{kKinds[static_cast<size_t>(c.mishap) - 1], ncclSystemError, "a mishap", 20};
  nccl.inject(
      [rank = c.rank, at = c.at](const NcclCall& call) {
        return call.rank == rank && call.stream != nullptr && call.count > 0 && call.nth == at;
      },
      fault);
}

TEST(NcclFaultProperty, AllRanksFailOrNoneDoes) {
  int failed = 0, fine = 0;
  const bool held = rc::check("all ranks fail or none does", [&] {
    const Case c = draw_case();
    RC_LOG() << "replay: " << c.str() << "\n";
    ThreadWorld world(c.world, c.options);
    inject(c, world.nccl());
    const auto errors = world.run([&](NcclRuntime& runtime) { Walker(c, runtime).walk(); });
    int with_error = 0;
    for (const std::string& error : errors) with_error += error.empty() ? 0 : 1;
    const int there = c.world - (c.mishap == Mishap::kProcessEnds ? 1 : 0);
    if (with_error != 0 && with_error != there) {
      throw std::runtime_error(
          fmt::format("{} of {} ranks failed: {}", with_error, there, fmt::join(errors, " | ")));
    }
    if (with_error != 0 && (c.mishap == Mishap::kNone || c.mishap == Mishap::kInProgress)) {
      throw std::runtime_error("an error without a fault: " + errors[0]);
    }
    if (with_error == 0 && c.mishap > Mishap::kInProgress) {
      throw std::runtime_error("no error though a rank has gone");
    }
    const auto faults = world.find_faults();
    if (!faults.empty()) throw std::runtime_error(fmt::format("{}", fmt::join(faults, "; ")));
    ++(with_error == 0 ? fine : failed);
  });
  EXPECT_TRUE(held);
  // The cases must have been worth drawing.
  EXPECT_GT(failed, 20);
  EXPECT_GT(fine, 10);
}

}  // namespace
}  // namespace ppfsdp::nccl::testing
