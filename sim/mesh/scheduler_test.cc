// The scheduler alone, under a policy that replays a list of choices: what a replay needs is no
// more than that list.
#include "sim/mesh/scheduler.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace ppfsdp::sim {
namespace {

/// Chooses by the list of indices, then always the first; remembers between how many it chose.
class Replay : public Policy {
 public:
  Replay(std::vector<int> choices, std::vector<int>& counts)
      : choices_(std::move(choices)), counts_(counts) {}

  ActorId choose(const ReadySet& ready, ActorId, Point) override {
    counts_.push_back(ready.count());
    const int choice = at_ < choices_.size() ? choices_[at_++] : 0;
    return ready.nth(choice % ready.count());
  }

 private:
  std::vector<int> choices_;
  std::vector<int>& counts_;
  size_t at_ = 0;
};

struct Quiet : Scheduler::Client {
  void before_resume(int rank) override { resumed.push_back(rank); }
  std::exception_ptr stuck() override {
    return all_returned() ? nullptr : std::make_exception_ptr(std::runtime_error("stuck"));
  }
  bool all_returned() const {
    for (int rank = 0; rank < n; ++rank) {
      if (!scheduler->has_returned(rank)) return false;
    }
    return true;
  }
  std::vector<int> resumed;
  Scheduler* scheduler = nullptr;
  int n = 0;
};

struct Outcome {
  std::string trace;
  std::vector<int> counts;
  std::vector<int> resumed;
  std::string error;
  int failed_rank = -1;
};

using Body = std::function<void(Scheduler& scheduler, int rank, std::string& trace)>;

Outcome outcome_of(int n, std::vector<int> choices, const Body& body) {
  Outcome result;
  Quiet client;
  Scheduler scheduler(n, std::make_unique<Replay>(std::move(choices), result.counts), client);
  client.scheduler = &scheduler;
  client.n = n;
  scheduler.run([&](int rank) { body(scheduler, rank, result.trace); }, 1 << 20);
  result.resumed = client.resumed;
  result.failed_rank = scheduler.failed_rank();
  try {
    if (scheduler.error() != nullptr) std::rethrow_exception(scheduler.error());
  } catch (const std::exception& e) {
    result.error = e.what();
  }
  return result;
}

const Body kTwoPoints = [](Scheduler& scheduler, int rank, std::string& trace) {
  trace += fmt::format("{}a ", rank);
  scheduler.point(rank, Point::kCommunication);
  trace += fmt::format("{}b ", rank);
};

TEST(Scheduler, follows_the_choices) {
  EXPECT_EQ(outcome_of(2, {0, 0}, kTwoPoints).trace, "0a 0b 1a 1b ");
  EXPECT_EQ(outcome_of(2, {0, 1, 1}, kTwoPoints).trace, "0a 1a 1b 0b ");
  EXPECT_EQ(outcome_of(2, {1, 0, 0}, kTwoPoints).trace, "1a 0a 0b 1b ");
  EXPECT_EQ(outcome_of(3, {2, 1, 0, 0, 0, 0}, kTwoPoints).trace, "2a 1a 0a 0b 1b 2b ");
}

TEST(Scheduler, asks_only_where_there_is_a_choice) {
  // Two ranks until the first returns, then there is nothing to choose.
  EXPECT_EQ(outcome_of(2, {0, 0}, kTwoPoints).counts, (std::vector<int>{2, 2}));
  EXPECT_TRUE(outcome_of(1, {}, kTwoPoints).counts.empty());
}

TEST(Scheduler, tells_before_a_rank_goes_on) {
  EXPECT_EQ(outcome_of(2, {0, 1, 0}, kTwoPoints).resumed, (std::vector<int>{0, 1}));
}

/// A task that counts its steps and wakes a rank after the last.
struct Countdown : Scheduler::Task {
  void step() override {
    trace += "s ";
    EXPECT_TRUE(scheduler->in_task());
    EXPECT_EQ(scheduler->running(), -1);
    if (--left == 0) {
      scheduler->set_ready(id, false);
      scheduler->set_ready(0, true);
    }
  }
  Scheduler* scheduler;
  std::string& trace;
  int left;
  ActorId id = -1;
  Countdown(Scheduler* scheduler, std::string& trace, int left)
      : scheduler(scheduler), trace(trace), left(left) {}
};

TEST(Scheduler, steps_tasks_until_the_rank_can_go_on) {
  std::unique_ptr<Countdown> task;
  const Outcome result = outcome_of(1, {}, [&](Scheduler& scheduler, int rank, std::string& trace) {
    task = std::make_unique<Countdown>(&scheduler, trace, 3);
    task->id = scheduler.add_task(*task);
    scheduler.set_ready(task->id, true);
    EXPECT_EQ(scheduler.running(), 0);
    trace += "block ";
    scheduler.block(rank);
    EXPECT_EQ(scheduler.running(), 0);
    trace += "on ";
  });
  EXPECT_EQ(result.trace, "block s s s on ");
  EXPECT_EQ(result.error, "");
}

TEST(Scheduler, nothing_to_run_is_the_clients_error) {
  const Outcome result = outcome_of(3, {}, [](Scheduler& scheduler, int rank, std::string&) {
    if (rank != 2) scheduler.block(rank);
  });
  EXPECT_EQ(result.error, "stuck");
  EXPECT_EQ(result.failed_rank, -1);
}

TEST(Scheduler, the_first_error_ends_every_rank_in_turn) {
  const Outcome result =
      outcome_of(4, {0, 1, 2, 1}, [](Scheduler& scheduler, int rank, std::string& trace) {
        try {
          scheduler.point(rank, Point::kCommunication);
          scheduler.point(rank, Point::kCommunication);
          if (rank == 1) throw std::runtime_error("broken");
          scheduler.block(rank);
          trace += "passed ";
        } catch (const RankEnded&) {
          trace += fmt::format("end{} ", rank);
          throw;
        }
      });
  EXPECT_EQ(result.error, "broken");
  EXPECT_EQ(result.failed_rank, 1);
  // Ranks that never began need not; those that began are told.
  EXPECT_EQ(result.trace.find("passed"), std::string::npos);
  EXPECT_NE(result.trace.find("end0"), std::string::npos);
}

}  // namespace
}  // namespace ppfsdp::sim
