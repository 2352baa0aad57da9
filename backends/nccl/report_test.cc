#include "backends/nccl/report.h"

#include <gtest/gtest.h>

namespace ppfsdp::nccl {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::system_clock;

const system_clock::time_point kNow{seconds(1'000'000)};

Group group_of(std::vector<int> ranks, int index) {
  return {"world", "world", std::move(ranks), index};
}

Report report_at(uint64_t issued, uint64_t finished, milliseconds age = milliseconds(100)) {
  Report report;
  report.time = kNow - age;
  report.groups["world"] = {issued, finished, "all_reduce of 10 Float by sum"};
  return report;
}

std::string describe(const Group& group, const Progress& mine,
                     const std::map<int, Report>& reports) {
  return describe_others(group, mine, reports, kNow, seconds(5));
}

TEST(Report, SurvivesTheStore) {
  Report report;
  report.beat = 7;
  report.time = kNow;
  report.left = true;
  report.groups["world"] = {3, 2, "broadcast of 2 Long from rank 0"};
  report.groups["world/4.0"] = {1, 0, "all_gather_into of 8 Float for 'a \"quoted\" \\ label'"};
  const auto back = report_from(to_text(report));
  ASSERT_TRUE(back.has_value());
  EXPECT_EQ(back->beat, report.beat);
  EXPECT_EQ(back->time, report.time);
  EXPECT_EQ(back->left, report.left);
  EXPECT_EQ(back->groups, report.groups);
}

// A label is the user's; the report must not throw on the thread that would tell the others.
TEST(Report, ALabelThatIsNoUtf8IsSentAnyway) {
  Report report;
  report.groups["world"] = {1, 0, "all_reduce for '\xff'"};
  EXPECT_TRUE(report_from(to_text(report)).has_value());
}

TEST(Report, WhatIsNoReportIsNone) {
  EXPECT_FALSE(report_from("").has_value());
  EXPECT_FALSE(report_from("{}").has_value());
  EXPECT_FALSE(report_from("{\"beat\": \"x\"}").has_value());
  EXPECT_FALSE(report_from("nonsense").has_value());
}

TEST(Report, TheRankThatIsBehindIsNamedWithWhatItDid) {
  const std::string text = describe(group_of({0, 1, 2}, 0), {42, 41, "x"},
                                    {{1, report_at(41, 41)}, {2, report_at(42, 40)}});
  EXPECT_EQ(text,
            "rank 1 last issued operation 40, all_reduce of 10 Float by sum, and has finished 40; "
            "rank 2 last issued operation 41, all_reduce of 10 Float by sum, and has finished 39");
}

TEST(Report, ASilentRankIsNamedWithItsAge) {
  EXPECT_EQ(describe(group_of({0, 3}, 0), {1, 0, "x"}, {{3, report_at(1, 1, seconds(12))}}),
            "rank 3 has not reported for 12 s; it last issued operation 0, all_reduce of 10 Float "
            "by sum, and has finished 0");
}

TEST(Report, ARankWithoutAReportIsNamed) {
  EXPECT_EQ(describe(group_of({0, 1}, 0), {1, 0, "x"}, {}), "rank 1 never reported");
}

TEST(Report, ARankThatHasLeftIsNamed) {
  Report left = report_at(1, 1, seconds(60));
  left.left = true;
  EXPECT_EQ(describe(group_of({0, 1}, 0), {2, 1, "x"}, {{1, left}}),
            "rank 1 ended its work; it last issued operation 0, all_reduce of 10 Float by sum, and "
            "has finished 0");
}

TEST(Report, OperationsOfOtherGroupsAreNotCounted) {
  Report other;
  other.time = kNow;
  other.groups["world/0.1"] = {9, 9, "x"};
  EXPECT_EQ(describe(group_of({0, 1}, 0), {1, 0, "x"}, {{1, other}}),
            "rank 1 had issued none of the group's operations");
}

// In a world of thousands the one that matters must not drown.
TEST(Report, RanksThatSayTheSameStandTogether) {
  const Progress mine{5, 4, "all_reduce of 10 Float by sum"};
  std::map<int, Report> reports;
  std::vector<int> ranks;
  for (int rank = 0; rank < 100; ++rank) {
    ranks.push_back(rank);
    reports[rank] = rank == 63 ? report_at(4, 4) : report_at(5, 4);
  }
  EXPECT_EQ(describe(group_of(ranks, 0), mine, reports),
            "rank 63 last issued operation 3, all_reduce of 10 Float by sum, and has finished 3; "
            "ranks 1-62, 64-99 are where this rank is");
}

TEST(Report, AloneThereIsNothingToSay) {
  EXPECT_EQ(describe(group_of({4}, 0), {1, 0, "x"}, {}), "");
}

}  // namespace
}  // namespace ppfsdp::nccl
