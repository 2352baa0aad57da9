#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "backends/nccl/report.h"

namespace ppfsdp::nccl {

/// A rank's news for the others and theirs for it, through the store.
///
/// The store is asked on a thread of its own, over a connection of its own, because it may never
/// answer again: the machine of rank 0 is gone. Whoever waits for an answer here waits for a
/// bounded time, and a thread that is stuck is left behind.
class Reporter {
 public:
  /// What the thread asks of and tells its rank; called at any time until the destructor returns,
  /// and after that too if the store hangs, so they own what they use.
  struct Rank {
    int number = 0;
    int world_size = 1;
    std::function<std::map<std::string, Progress>()> progress;
    /// Whether work of this rank is under way.
    std::function<bool()> waits;
    /// Another rank has failed, or the store is gone.
    std::function<void(const std::string& why)> fail;
  };

  /// Every `period` the rank's progress goes to the store, if it has changed or the last report is
  /// three periods old, and the others' failure is looked for. A rank that waits takes its
  /// neighbour (the next number) for dead when no new report of it came for `silence`: so every
  /// death is seen by one rank and told to all.
  Reporter(c10::intrusive_ptr<c10d::Store> store, Rank rank, std::chrono::milliseconds period,
           std::chrono::milliseconds silence);
  ~Reporter();
  Reporter(const Reporter&) = delete;
  Reporter& operator=(const Reporter&) = delete;

  struct Found {
    bool answered = false;
    /// "rank 3 failed: ...": the failure that was published first, unless it is this rank's own.
    std::optional<std::string> failure;
    std::map<int, Report> reports;
  };
  /// What the store holds of these ranks. Waits for `limit` at most.
  Found collect(const std::vector<int>& ranks, std::chrono::milliseconds limit);

  /// Tells the others that this rank has failed, after a last report; the first failure of the
  /// world stays. Waits for `limit` at most.
  void publish_failure(const std::string& message, std::chrono::milliseconds limit);

  /// After a failure of this rank, for its end: on rank 0, whose process has the store, waits until
  /// every other rank has heard of a failure, has failed or has left, for `limit` at most.
  void linger(std::chrono::milliseconds limit);

  /// The rank has ended its work: a last report, and on rank 0, where the store is, a wait for the
  /// others' last ones. No news after that. Waits for `limit` at most.
  void leave(std::chrono::milliseconds limit);

 private:
  struct State;
  static void serve(const std::shared_ptr<State>& state);
  /// Runs `job` on the thread; whether it ended in time.
  bool ask(std::function<void(State&)> job, std::chrono::milliseconds limit);

  std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace ppfsdp::nccl
