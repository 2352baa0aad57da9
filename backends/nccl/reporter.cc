#include "backends/nccl/reporter.h"

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <future>
#include <mutex>
#include <utility>

#include "src/comm/text.h"

namespace ppfsdp::nccl {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using std::chrono::system_clock;

constexpr const char* kFailure = "ppfsdp/nccl/failure";
constexpr const char* kLeft = "ppfsdp/nccl/left";
/// Other ranks than 0 to which no failure is news any more.
constexpr const char* kHeard = "ppfsdp/nccl/heard";
/// Periods between reports that say nothing new.
constexpr int kQuietPeriods = 3;
constexpr milliseconds kPatience{2000};

std::string report_key(int rank) { return fmt::format("ppfsdp/nccl/report/{}", rank); }

std::optional<std::string> read(c10d::Store& store, const std::string& key) {
  if (!store.check({key})) return std::nullopt;
  const std::vector<uint8_t> bytes = store.get(key);
  return std::string(bytes.begin(), bytes.end());
}

void write(c10d::Store& store, const std::string& key, const std::string& text) {
  store.set(key, std::vector<uint8_t>(text.begin(), text.end()));
}

void wait_for_count(c10d::Store& store, const char* key, int64_t count, milliseconds limit) {
  const auto deadline = steady_clock::now() + limit;
  while (store.add(key, 0) < count && steady_clock::now() < deadline) {
    std::this_thread::sleep_for(milliseconds(2));
  }
}

}  // namespace

struct Reporter::State {
  c10::intrusive_ptr<c10d::Store> store;
  Rank rank;
  milliseconds period;
  milliseconds silence;

  std::mutex mutex;
  std::condition_variable changed;
  /// Guarded by mutex.
  std::deque<std::function<void(State&)>> jobs;
  bool stopping = false;
  bool ended = false;

  // Of the thread alone.
  Report last;
  steady_clock::time_point last_time{};
  std::optional<uint64_t> neighbour_beat;
  steady_clock::time_point neighbour_time{};
  bool gone = false;
  bool left = false;
  bool heard = false;

  /// No failure is news to this rank from now on.
  void count_heard() {
    if (!heard && rank.number != 0) store->add(kHeard, 1);
    heard = true;
  }

  void report(bool always) {
    auto groups = rank.progress();
    const auto now = steady_clock::now();
    if (!always && groups == last.groups && now - last_time < kQuietPeriods * period) return;
    last.groups = std::move(groups);
    ++last.beat;
    last.time = system_clock::now();
    last.left = left;
    last_time = now;
    write(*store, report_key(rank.number), to_text(last));
  }

  std::optional<std::string> find_failure() {
    const std::optional<std::string> note = read(*store, kFailure);
    if (!note) return std::nullopt;
    const size_t end = note->find('\n');
    const std::string number = note->substr(0, end);
    if (end == std::string::npos || number == std::to_string(rank.number)) return std::nullopt;
    return fmt::format("rank {} failed: {}", number, note->substr(end + 1));
  }

  /// Whether the neighbour has been silent for too long.
  void watch_neighbour() {
    const int neighbour = (rank.number + 1) % rank.world_size;
    const std::optional<std::string> text = read(*store, report_key(neighbour));
    const std::optional<Report> report = text ? report_from(*text) : std::nullopt;
    if (report && report->left) return;
    const auto now = steady_clock::now();
    const std::optional<uint64_t> beat = report ? std::optional(report->beat) : std::nullopt;
    if (beat != neighbour_beat || neighbour_time == steady_clock::time_point{}) {
      neighbour_beat = beat;
      neighbour_time = now;
    } else if (now - neighbour_time > silence && rank.waits()) {
      rank.fail(fmt::format("rank {} gave no sign of life for {}: its process ended or hangs",
                            neighbour,
                            comm::seconds(std::chrono::duration_cast<milliseconds>(silence))));
    }
  }

  void look_round() {
    report(/*always=*/false);
    if (const auto failure = find_failure()) {
      rank.fail(*failure);
      return count_heard();
    }
    watch_neighbour();
  }

  /// Runs what talks to the store, unless that has gone.
  void talk(const std::function<void(State&)>& job) {
    if (gone) return;
    try {
      job(*this);
    } catch (const std::exception& error) {
      gone = true;
      // A rank that has ended its work does not need it any more.
      if (!left) {
        rank.fail(fmt::format("the store on rank 0 is gone: rank 0 ended or cannot be reached ({})",
                              comm::first_line(error.what())));
      }
    }
  }
};

Reporter::Reporter(c10::intrusive_ptr<c10d::Store> store, Rank rank, milliseconds period,
                   milliseconds silence)
    : state_(std::make_shared<State>()) {
  state_->store = std::move(store);
  state_->rank = std::move(rank);
  state_->period = period;
  state_->silence = silence;
  thread_ = std::thread([state = state_] { serve(state); });
}

Reporter::~Reporter() {
  std::unique_lock lock(state_->mutex);
  state_->stopping = true;
  state_->changed.notify_all();
  const bool ended = state_->changed.wait_for(lock, kPatience, [&] { return state_->ended; });
  lock.unlock();
  if (ended) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

void Reporter::serve(const std::shared_ptr<State>& state) {
  std::unique_lock lock(state->mutex);
  auto next = steady_clock::now();
  while (!state->stopping) {
    std::function<void(State&)> job;
    if (!state->jobs.empty()) {
      job = std::move(state->jobs.front());
      state->jobs.pop_front();
    } else if (steady_clock::now() >= next) {
      next = steady_clock::now() + state->period;
      if (state->left || state->gone) continue;
      job = [](State& state) { state.look_round(); };
    } else {
      state->changed.wait_until(lock, next);
      continue;
    }
    lock.unlock();
    state->talk(job);
    // Its end tells whoever waits for it.
    job = nullptr;
    lock.lock();
  }
  state->jobs.clear();
  state->ended = true;
  state->changed.notify_all();
}

bool Reporter::ask(std::function<void(State&)> job, milliseconds limit) {
  const auto done = std::make_shared<std::promise<void>>();
  std::future<void> future = done->get_future();
  {
    const std::lock_guard lock(state_->mutex);
    state_->jobs.push_back([job = std::move(job), done](State& state) {
      job(state);
      done->set_value();
    });
    state_->changed.notify_all();
  }
  if (future.wait_for(limit) != std::future_status::ready) return false;
  return true;
}

Reporter::Found Reporter::collect(const std::vector<int>& ranks, milliseconds limit) {
  const auto found = std::make_shared<Found>();
  const bool answered = ask(
      [found, ranks](State& state) {
        found->failure = state.find_failure();
        for (const int rank : ranks) {
          if (rank == state.rank.number) continue;
          const auto text = read(*state.store, report_key(rank));
          if (const auto report = text ? report_from(*text) : std::nullopt) {
            found->reports[rank] = *report;
          }
        }
        found->answered = true;
      },
      limit);
  // A late answer may still be on its way into what it was promised.
  return answered ? *found : Found{};
}

void Reporter::publish_failure(const std::string& message, milliseconds limit) {
  ask(
      [message](State& state) {
        state.report(/*always=*/true);
        const std::string note = fmt::format("{}\n{}", state.rank.number, message);
        state.store->compareSet(kFailure, {}, std::vector<uint8_t>(note.begin(), note.end()));
        state.count_heard();
      },
      limit);
}

void Reporter::linger(milliseconds limit) {
  ask(
      [limit](State& state) {
        if (state.rank.number != 0) return;
        wait_for_count(*state.store, kHeard, state.rank.world_size - 1, limit);
      },
      limit + kPatience / 4);
}

void Reporter::leave(milliseconds limit) {
  ask(
      [limit](State& state) {
        state.left = true;
        state.report(/*always=*/true);
        state.store->add(kLeft, 1);
        state.count_heard();
        if (state.rank.number == 0) {
          wait_for_count(*state.store, kLeft, state.rank.world_size, limit);
        }
      },
      limit + kPatience / 4);
}

}  // namespace ppfsdp::nccl
