// The set of actors that can run, and how each schedule picks from it.
#include "sim/mesh/schedule.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <vector>

namespace ppfsdp::sim {
namespace {

ReadySet ready_set(const std::vector<ActorId>& ids) {
  ReadySet ready;
  for (const ActorId id : ids) ready.insert(id);
  return ready;
}

TEST(ReadySet, agrees_with_a_sorted_set) {
  ReadySet ready;
  std::set<ActorId> model;
  uint32_t state = 1;
  for (int step = 0; step < 5000; ++step) {
    state = state * 1664525u + 1013904223u;
    const ActorId id = static_cast<ActorId>(state >> 24);
    if ((state >> 8 & 1) != 0) {
      ready.insert(id);
      model.insert(id);
    } else {
      ready.erase(id);
      model.erase(id);
    }
    ASSERT_EQ(ready.count(), static_cast<int>(model.size()));
    ASSERT_EQ(ready.empty(), model.empty());
    ASSERT_EQ(ready.contains(id), model.contains(id));
    if (model.empty()) continue;
    const auto behind = model.upper_bound(id);
    ASSERT_EQ(ready.next_after(id), behind == model.end() ? *model.begin() : *behind);
    ASSERT_EQ(ready.next_after(-1), *model.begin());
    int index = 0;
    for (const ActorId each : model) ASSERT_EQ(ready.nth(index++), each);
    ASSERT_THROW(ready.nth(index), c10::Error);
  }
  EXPECT_FALSE(ready.contains(-1));
  EXPECT_FALSE(ready.contains(100000));
}

TEST(RoundRobin, takes_turns_but_lets_a_rank_queue_on) {
  const auto policy = make_policy(Schedule::kRoundRobin, 0, 4);
  const ReadySet ready = ready_set({0, 2, 3, 9});
  EXPECT_EQ(policy->choose(ready, -1, Point::kBlocked), 0);
  EXPECT_EQ(policy->choose(ready, 0, Point::kCommunication), 2);
  EXPECT_EQ(policy->choose(ready, 3, Point::kBlocked), 9);
  EXPECT_EQ(policy->choose(ready, 9, Point::kBlocked), 0);
  EXPECT_EQ(policy->choose(ready, 2, Point::kQueue), 2);
  EXPECT_EQ(policy->choose(ready, 1, Point::kQueue), 2) << "rank 1 cannot go on";
}

TEST(Lazy, runs_streams_only_when_no_rank_can_run) {
  const auto policy = make_policy(Schedule::kLazy, 0, 4);
  const ReadySet ready = ready_set({1, 3, 5, 8});
  EXPECT_EQ(policy->choose(ready, 1, Point::kQueue), 1);
  EXPECT_EQ(policy->choose(ready, 1, Point::kCommunication), 1);
  EXPECT_EQ(policy->choose(ready, 1, Point::kBlocked), 3);
  EXPECT_EQ(policy->choose(ready, 3, Point::kBlocked), 1) << "ranks come before streams";
  EXPECT_EQ(policy->choose(ready, 5, Point::kBlocked), 1);
  const ReadySet streams = ready_set({5, 8});
  EXPECT_EQ(policy->choose(streams, 3, Point::kBlocked), 5);
  EXPECT_EQ(policy->choose(streams, 5, Point::kBlocked), 8);
  EXPECT_EQ(policy->choose(streams, 8, Point::kBlocked), 5);
}

TEST(Schedule, has_one_name) {
  EXPECT_EQ(parse_schedule("lazy"), Schedule::kLazy);
  EXPECT_EQ(parse_schedule("random"), Schedule::kRandom);
  EXPECT_EQ(parse_schedule("round_robin"), Schedule::kRoundRobin);
  EXPECT_EQ(schedule_names(), (std::vector<std::string>{"lazy", "random", "round_robin"}));
  try {
    parse_schedule("eager");
    ADD_FAILURE() << "no error";
  } catch (const c10::Error& error) {
    EXPECT_STREQ(error.what_without_backtrace(),
                 "unknown schedule 'eager'; it is one of lazy, random, round_robin");
  }
}

TEST(Random, reaches_every_actor_and_repeats_itself) {
  const ReadySet ready = ready_set({0, 1, 2, 7, 70});
  const auto draw = [&](uint64_t seed, Point point) {
    const auto policy = make_policy(Schedule::kRandom, seed, 4);
    std::vector<ActorId> chosen;
    for (int i = 0; i < 1000; ++i) chosen.push_back(policy->choose(ready, 1, point));
    return chosen;
  };
  EXPECT_EQ(draw(7, Point::kBlocked), draw(7, Point::kBlocked));
  EXPECT_NE(draw(7, Point::kBlocked), draw(8, Point::kBlocked));
  std::map<ActorId, int> counts, queue_counts;
  for (const ActorId id : draw(7, Point::kCommunication)) ++counts[id];
  for (const ActorId id : draw(7, Point::kQueue)) ++queue_counts[id];
  // 200 each are expected; 120 is more than six standard deviations below.
  for (const ActorId id : {0, 1, 2, 7, 70}) EXPECT_GT(counts[id], 120) << id;
  // 50 each and 800 for the rank itself.
  for (const ActorId id : {0, 2, 7, 70}) EXPECT_GT(queue_counts[id], 10) << id;
  EXPECT_GT(queue_counts[1], 700);
}

}  // namespace
}  // namespace ppfsdp::sim
