#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "sim/mesh/world.h"

namespace ppfsdp::sim {

/// "lazy", "random", "round_robin".
const std::vector<std::string>& schedule_names();
/// The schedule of that name; an error that lists the names otherwise.
Schedule parse_schedule(const std::string& name);

/// Who can run: ranks are numbered 0 to n - 1, streams from n on.
using ActorId = int;

/// The actors that can run now, in the order of their ids.
class ReadySet {
 public:
  bool empty() const { return count_ == 0; }
  int count() const { return count_; }
  bool contains(ActorId id) const;
  void insert(ActorId id);
  void erase(ActorId id);
  /// The `index`-th of the actors; 0 <= index < count().
  ActorId nth(int index) const;
  /// The first actor behind `id`, starting anew at 0 after the last; not empty. `id` may be -1.
  ActorId next_after(ActorId id) const;

 private:
  std::vector<uint64_t> words_;
  int count_ = 0;
};

/// Where a rank asks who goes on.
enum class Point {
  kQueue,          ///< it queued work, recorded an event, freed or allocated memory
  kCommunication,  ///< it issued a collective or is about to look at an event
  kBlocked,        ///< it cannot go on, has ended, or a stream has just run
};

/// Decides every hand-over of a run. A replay needs no more than the choices made here.
class Policy {
 public:
  virtual ~Policy() = default;

  /// The actor that goes next, one of `ready`, which is not empty. `current` went last (-1 at the
  /// start); it is in `ready` only if it can go on.
  virtual ActorId choose(const ReadySet& ready, ActorId current, Point point) = 0;
};

/// For a world of `n` ranks.
std::unique_ptr<Policy> make_policy(Schedule schedule, uint64_t seed, int n);

}  // namespace ppfsdp::sim
