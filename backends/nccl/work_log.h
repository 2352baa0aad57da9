#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "backends/nccl/event_pool.h"
#include "backends/nccl/group.h"
#include "backends/nccl/report.h"
#include "src/comm/call.h"

namespace ppfsdp::nccl {

class Check;

/// Which operation it is, put into words only when it has failed.
struct What {
  GroupPtr group;
  /// Collectives of a group are counted, and messages for each pair of ranks and direction.
  uint64_t number = 0;
  comm::Call call;
  /// Of a message: the other rank of the group, and whether this rank is its sender.
  int peer = -1;
  bool sends = false;

  /// "all_reduce of 10 Float by sum for 'embed' on group 'world', operation 3",
  /// "send of 5 Float to rank 2 on group 'world', message 0".
  std::string to_string() const;
};

/// One operation that is under way.
struct Work {
  What what;
  /// Works of one stream end in the order in which they were issued.
  const void* stream = nullptr;
  std::chrono::steady_clock::time_point issued;
  EventPool::Handle end;
  /// The comparison of the ranks' calls that is made when the work has ended; may be null.
  std::shared_ptr<const Check> check;
  /// It is only the comparison before the operation, which is not finished with it.
  bool prelude = false;
};

/// What a rank has issued and what of it has ended. Any thread.
class WorkLog {
 public:
  void add(Work work);

  /// Takes out works of which done(work) holds, and appends to `checks` those that have a
  /// comparison. It asks about a work only when the earlier ones of its stream are done, and about
  /// `limit` that are done at most, since add() has to wait meanwhile; true when there may be more.
  bool sweep(const std::function<bool(const Work&)>& done, size_t limit, std::vector<Work>& checks);

  /// The oldest work under way that was issued before `time`.
  std::optional<What> find_older(std::chrono::steady_clock::time_point time) const;
  /// The oldest of a group that is under way.
  std::optional<What> find_oldest(const Group& group) const;

  bool empty() const;
  /// How far this rank is, of every group that has issued something.
  std::map<std::string, Progress> progress() const;

 private:
  struct Entry {
    Work work;
    bool done = false;
  };
  struct Counts {
    uint64_t finished = 0;
    /// The last collective issued.
    What last;
  };

  mutable std::mutex mutex_;
  /// Guarded by mutex_; in the order of issue. Entries that are done wait for those before them.
  std::deque<Entry> works_;
  size_t running_ = 0;
  std::map<const Group*, Counts> groups_;
};

}  // namespace ppfsdp::nccl
