#include "sim/mesh/schedule.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <bit>
#include <random>
#include <utility>

namespace ppfsdp::sim {
namespace {

constexpr int kWordBits = 64;

constexpr std::pair<const char*, Schedule> kNames[] = {{"lazy", Schedule::kLazy},
                                                       {"random", Schedule::kRandom},
                                                       {"round_robin", Schedule::kRoundRobin}};

/// The actor itself while it only queues work, else the next in order.
class RoundRobinPolicy : public Policy {
 public:
  ActorId choose(const ReadySet& ready, ActorId current, Point point) override {
    if (point == Point::kQueue && ready.contains(current)) return current;
    return ready.next_after(current);
  }
};

/// Any actor, with equal chance. After merely queueing work the rank goes on three times in four:
/// a hand-over to another rank at every such point would cost more than the step it tests.
class RandomPolicy : public Policy {
 public:
  explicit RandomPolicy(uint64_t seed) : generator_(seed) {}

  ActorId choose(const ReadySet& ready, ActorId current, Point point) override {
    const uint64_t draw = generator_();
    if (point == Point::kQueue && ready.contains(current) && draw % 4 != 0) return current;
    return ready.nth(static_cast<int>((draw >> 2) % static_cast<uint64_t>(ready.count())));
  }

 private:
  std::mt19937_64 generator_;
};

/// Ranks as long as any can go on, in order; only then streams.
class LazyPolicy : public Policy {
 public:
  explicit LazyPolicy(int n) : n_(n) {}

  ActorId choose(const ReadySet& ready, ActorId current, Point point) override {
    if (point != Point::kBlocked && ready.contains(current)) return current;
    const ActorId next = ready.next_after(current);
    if (next < n_) return next;
    // Behind `current` there are only streams; ranks before it come first.
    const ActorId first = ready.nth(0);
    return first < n_ ? first : next;
  }

 private:
  int n_;
};

}  // namespace

const std::vector<std::string>& schedule_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> result;
    for (const auto& [name, schedule] : kNames) result.emplace_back(name);
    return result;
  }();
  return names;
}

Schedule parse_schedule(const std::string& name) {
  for (const auto& [known, schedule] : kNames) {
    if (name == known) return schedule;
  }
  TORCH_CHECK(false, "unknown schedule '", name, "'; it is one of ",
              fmt::format("{}", fmt::join(schedule_names(), ", ")));
}

bool ReadySet::contains(ActorId id) const {
  const auto word = static_cast<size_t>(id) / kWordBits;
  return id >= 0 && word < words_.size() && (words_[word] >> (id % kWordBits) & 1) != 0;
}

void ReadySet::insert(ActorId id) {
  if (contains(id)) return;
  const auto word = static_cast<size_t>(id) / kWordBits;
  if (word >= words_.size()) words_.resize(word + 1);
  words_[word] |= uint64_t{1} << (id % kWordBits);
  ++count_;
}

void ReadySet::erase(ActorId id) {
  if (!contains(id)) return;
  words_[static_cast<size_t>(id) / kWordBits] &= ~(uint64_t{1} << (id % kWordBits));
  --count_;
}

ActorId ReadySet::nth(int index) const {
  TORCH_INTERNAL_ASSERT(index >= 0 && index < count_);
  for (size_t word = 0;; ++word) {
    const int here = std::popcount(words_[word]);
    if (index >= here) {
      index -= here;
      continue;
    }
    uint64_t bits = words_[word];
    for (; index > 0; --index) bits &= bits - 1;
    return static_cast<int>(word) * kWordBits + std::countr_zero(bits);
  }
}

ActorId ReadySet::next_after(ActorId id) const {
  TORCH_INTERNAL_ASSERT(count_ > 0);
  const int from = id + 1;
  for (auto word = static_cast<size_t>(from / kWordBits); word < words_.size(); ++word) {
    uint64_t bits = words_[word];
    if (word == static_cast<size_t>(from / kWordBits)) bits &= ~uint64_t{0} << (from % kWordBits);
    if (bits != 0) return static_cast<int>(word) * kWordBits + std::countr_zero(bits);
  }
  return nth(0);
}

std::unique_ptr<Policy> make_policy(Schedule schedule, uint64_t seed, int n) {
  switch (schedule) {
    case Schedule::kRoundRobin:
      return std::make_unique<RoundRobinPolicy>();
    case Schedule::kRandom:
      return std::make_unique<RandomPolicy>(seed);
    case Schedule::kLazy:
      return std::make_unique<LazyPolicy>(n);
  }
  TORCH_INTERNAL_ASSERT(false, "unknown Schedule ", static_cast<int>(schedule));
}

}  // namespace ppfsdp::sim
