#include "backends/nccl/call_record.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace ppfsdp::nccl {
namespace {

using comm::Call;

Call reduce_scatter(int64_t count, const std::string& label) {
  Call call;
  call.kind = Call::Kind::kReduceScatter;
  call.dtype = at::kFloat;
  call.op = comm::ReduceOp::avg();
  call.count = count;
  call.label = label;
  return call;
}

std::vector<int64_t> records_of(const std::vector<Call>& calls) {
  std::vector<int64_t> records(calls.size() * record_words());
  for (size_t i = 0; i < calls.size(); ++i) {
    write_record(calls[i], records.data() + i * record_words());
  }
  return records;
}

std::optional<std::string> difference(const std::vector<Call>& calls) {
  std::vector<int> names;
  for (size_t i = 0; i < calls.size(); ++i) names.push_back(static_cast<int>(10 + i));
  return find_record_difference(records_of(calls).data(), static_cast<int>(calls.size()), names);
}

// A record of an all_to_all has lists of the group's size in comm::Call: with them, ranks that
// disagree about the operation would gather different numbers of words.
TEST(CallRecord, HasOneLengthForEveryCall) {
  Call lists = reduce_scatter(4, "x");
  lists.kind = Call::Kind::kAllToAll;
  lists.sends = {1, 2, 3};
  lists.receives = {4, 5, 6};
  std::vector<int64_t> record(record_words() + 1, -7);
  write_record(lists, record.data());
  EXPECT_EQ(record.back(), -7) << "written beyond the record";
}

// The comparison relies on an encoded call being its record and then its lists.
TEST(CallRecord, IsTheBeginningOfTheEncodedCall) {
  Call call = reduce_scatter(4, "layers.0");
  call.kind = Call::Kind::kAllToAll;
  call.sends = {1, 2, 3};
  call.receives = {4, 5, 6};
  std::vector<int64_t> whole(comm::encoded_size(3));
  comm::encode(call, 3, whole.data());
  const std::vector<int64_t> record = records_of({call});
  EXPECT_TRUE(std::equal(record.begin(), record.end(), whole.begin()));
}

TEST(CallRecord, EqualCallsDoNotDiffer) {
  EXPECT_EQ(difference({reduce_scatter(4, "a"), reduce_scatter(4, "a"), reduce_scatter(4, "a")}),
            std::nullopt);
}

TEST(CallRecord, TheOddRankIsNamedByItsNameInTheWorld) {
  const auto text =
      difference({reduce_scatter(4, "a"), reduce_scatter(4, "a"), reduce_scatter(8, "a")});
  ASSERT_TRUE(text.has_value());
  EXPECT_EQ(*text,
            "rank 12 differs: it calls reduce_scatter of 8 Float by avg for 'a', rank 10 calls "
            "reduce_scatter of 4 Float by avg for 'a'");
}

TEST(CallRecord, LabelsMatter) {
  const auto text = difference({reduce_scatter(4, "layers.0"), reduce_scatter(4, "layers.1")});
  ASSERT_TRUE(text.has_value());
  EXPECT_NE(text->find("'layers.1'"), std::string::npos) << *text;
}

// New groups of different members may have different names; whether those of one group agree is
// for the lists to tell.
TEST(CallRecord, NamesOfDifferentNewGroupsAreNoDifference) {
  Call even, odd;
  even.kind = odd.kind = Call::Kind::kSubgroup;
  even.label = "even";
  odd.label = "odd";
  EXPECT_EQ(difference({even, odd, even, odd}), std::nullopt);
  EXPECT_TRUE(has_lists(Call::Kind::kSubgroup));
}

}  // namespace
}  // namespace ppfsdp::nccl
