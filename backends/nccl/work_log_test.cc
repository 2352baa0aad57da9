#include "backends/nccl/work_log.h"

#include <gtest/gtest.h>

#include <set>

namespace ppfsdp::nccl {
namespace {

using std::chrono::seconds;
using std::chrono::steady_clock;

const steady_clock::time_point kStart{seconds(1000)};

GroupPtr make_group(const std::string& name) {
  return std::make_shared<Group>(Group{name, "key of " + name, {2, 5}, 1});
}

What collective(const GroupPtr& group, uint64_t number) {
  What what{group, number, {}};
  what.call.kind = comm::Call::Kind::kAllReduce;
  what.call.dtype = at::kFloat;
  what.call.count = 10;
  return what;
}

Work work_on(const void* stream, What what, steady_clock::time_point issued = kStart) {
  return {std::move(what), stream, issued, nullptr, nullptr};
}

const int kA = 0, kB = 0;
const void* const kStreamA = &kA;
const void* const kStreamB = &kB;

/// Sweeps what is numbered in `done`.
std::vector<Work> sweep(WorkLog& log, const std::set<uint64_t>& done) {
  std::vector<Work> checks;
  log.sweep([&](const Work& work) { return done.count(work.what.number) > 0; }, 100, checks);
  return checks;
}

TEST(What, SaysWhatAndWhere) {
  const GroupPtr group = make_group("dp");
  EXPECT_EQ(collective(group, 3).to_string(),
            "all_reduce of 10 Float by sum on group 'dp', operation 3");
  What message{group, 4, {}, 0, true};
  message.call.kind = comm::Call::Kind::kMessage;
  message.call.dtype = at::kLong;
  message.call.count = 5;
  EXPECT_EQ(message.to_string(), "send of 5 Long to rank 2 on group 'dp', message 4");
  message.sends = false;
  EXPECT_EQ(message.to_string(), "recv of 5 Long from rank 2 on group 'dp', message 4");
}

TEST(WorkLog, CountsWhatIsIssuedAndFinished) {
  WorkLog log;
  const GroupPtr group = make_group("dp");
  EXPECT_TRUE(log.empty());
  log.add(work_on(kStreamA, collective(group, 0)));
  log.add(work_on(kStreamA, collective(group, 1)));
  EXPECT_FALSE(log.empty());
  sweep(log, {0});
  const Progress expected{2, 1, "all_reduce of 10 Float by sum"};
  EXPECT_EQ(log.progress().at("key of dp"), expected);
  sweep(log, {1});
  EXPECT_TRUE(log.empty());
  EXPECT_EQ(log.progress().at("key of dp").finished, 2u);
}

// The comparison before an operation ends long before the operation: another rank would read that
// this one has finished what it has not even issued.
TEST(WorkLog, AComparisonIsNotTheOperation) {
  WorkLog log;
  const GroupPtr group = make_group("dp");
  Work prelude = work_on(kStreamA, collective(group, 0));
  prelude.prelude = true;
  log.add(std::move(prelude));
  sweep(log, {0});
  EXPECT_EQ(log.progress().at("key of dp").issued, 1u);
  EXPECT_EQ(log.progress().at("key of dp").finished, 0u);
}

// A later work of a stream is not asked for: its event costs a call of the driver.
TEST(WorkLog, AsksOnlyForTheFirstOfEachStream) {
  WorkLog log;
  const GroupPtr group = make_group("dp");
  log.add(work_on(kStreamA, collective(group, 0)));
  log.add(work_on(kStreamA, collective(group, 1)));
  log.add(work_on(kStreamB, collective(group, 2)));
  log.add(work_on(kStreamB, collective(group, 3)));
  std::vector<uint64_t> asked;
  std::vector<Work> checks;
  log.sweep(
      [&](const Work& work) {
        asked.push_back(work.what.number);
        return work.what.number == 2;
      },
      100, checks);
  EXPECT_EQ(asked, (std::vector<uint64_t>{0, 2, 3}));
}

TEST(WorkLog, DoesNotHoldUpTheRankForMoreThanItsLimit) {
  WorkLog log;
  const GroupPtr group = make_group("dp");
  for (uint64_t i = 0; i < 5; ++i) log.add(work_on(kStreamA, collective(group, i)));
  std::vector<Work> checks;
  const auto all = [](const Work&) { return true; };
  EXPECT_TRUE(log.sweep(all, 2, checks));
  EXPECT_EQ(log.progress().at("key of dp").finished, 2u);
  EXPECT_TRUE(log.sweep(all, 2, checks));
  EXPECT_FALSE(log.sweep(all, 2, checks));
  EXPECT_TRUE(log.empty());
}

TEST(WorkLog, FindsTheOldestThatIsUnderWay) {
  WorkLog log;
  const GroupPtr group = make_group("dp"), other = make_group("tp");
  log.add(work_on(kStreamA, collective(group, 0), kStart));
  log.add(work_on(kStreamB, collective(other, 7), kStart + seconds(1)));
  log.add(work_on(kStreamA, collective(group, 1), kStart + seconds(2)));
  EXPECT_FALSE(log.find_older(kStart).has_value()) << "issued then is not older";
  ASSERT_TRUE(log.find_older(kStart + seconds(9)).has_value());
  EXPECT_EQ(log.find_older(kStart + seconds(9))->number, 0u);
  sweep(log, {0});
  EXPECT_FALSE(log.find_older(kStart + seconds(1)).has_value());
  EXPECT_EQ(log.find_older(kStart + seconds(9))->number, 7u);
  EXPECT_EQ(log.find_oldest(*group)->number, 1u);
  sweep(log, {1, 7});
  EXPECT_FALSE(log.find_older(kStart + seconds(9)).has_value());
  EXPECT_FALSE(log.find_oldest(*group).has_value());
}

// Works of another stream that end first wait for nobody, and the log does not grow with them.
TEST(WorkLog, EndsOutOfOrderAcrossStreams) {
  WorkLog log;
  const GroupPtr group = make_group("dp");
  log.add(work_on(kStreamA, collective(group, 0)));
  log.add(work_on(kStreamB, collective(group, 1)));
  sweep(log, {1});
  EXPECT_EQ(log.find_oldest(*group)->number, 0u);
  EXPECT_EQ(log.progress().at("key of dp").finished, 2u);
  sweep(log, {0});
  EXPECT_TRUE(log.empty());
}

}  // namespace
}  // namespace ppfsdp::nccl
