#pragma once

#include <deque>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "sim/mesh/operation.h"
#include "sim/mesh/scheduler.h"
#include "sim/mesh/shared_memory.h"
#include "sim/mesh/sim_stream.h"
#include "sim/mesh/world.h"

namespace ppfsdp::sim {

/// All state of one simulated world. Touched by the holder of the baton only.
class World : public Scheduler::Client {
 public:
  World(int n, const WorldOptions& options);
  ~World() override;

  int size() const { return static_cast<int>(ranks_.size()); }
  const WorldOptions& options() const { return options_; }
  Scheduler& scheduler() { return scheduler_; }
  const GroupPtr& world_group() const { return world_group_; }
  /// A group of the world whose operations `clear` drops.
  GroupPtr add_group(std::string name, std::vector<int> ranks);

  StreamQueue& add_stream(int rank, const std::string& name, bool is_compute);
  StreamQueue& compute_queue(int rank) { return *ranks_[rank].compute; }

  /// An error unless it is `rank`'s code that runs now. `what` leads the message.
  void check_caller(int rank, const char* what) const;

  /// Lets a blocked rank, or a stream whose head waited, go on.
  void wake(ActorId id);
  /// `error`, of a stream's closure, has been thrown to `rank`'s code.
  void set_error_seen(int rank, const std::exception_ptr& error);

  /// Blocks `rank` until the event or the operation is done, or the world ends.
  void wait_for(int rank, const SimEventPtr& event);
  void wait_for(int rank, const std::shared_ptr<Operation>& operation);

  /// Remembers (forgets) an operation at the head of `rank`'s stream that has not run, so that its
  /// outputs are poisoned before any code of the rank can look at them.
  void add_in_flight(int rank, Operation& operation, int index);
  void remove_in_flight(int rank, const Operation& operation);
  void poison_in_flight(int rank);

  /// Makes poison, as much as `bytes`, the memory of `storage`; who writes there gets a copy.
  void put_poison_under(c10::StorageImpl& storage, size_t bytes);
  /// Whether `storage` lies on it.
  bool is_on_poison(const c10::StorageImpl& storage) const;

  void before_resume(int rank) override { poison_in_flight(rank); }
  std::exception_ptr stuck() override;

  /// Drops all work that is left. (Queues, operations and groups refer to one another and to the
  /// world, and would keep each other alive.)
  void clear();

 private:
  struct InFlight {
    Operation* operation;
    int index;
  };
  struct RankState {
    StreamQueue* compute = nullptr;
    std::vector<InFlight> in_flight;
    std::vector<std::exception_ptr> seen_errors;
    SimEventPtr waits_for_event;
    std::shared_ptr<Operation> waits_for_operation;
  };

  std::string describe_wait(int rank) const;

  WorldOptions options_;
  std::vector<RankState> ranks_;
  Scheduler scheduler_;
  std::deque<std::unique_ptr<StreamQueue>> streams_;
  std::vector<std::weak_ptr<Group>> groups_;
  GroupPtr world_group_;
  /// The largest, which serves all requests, is the last.
  std::vector<SharedMemory> poison_;
};

}  // namespace ppfsdp::sim
