#include "src/comm/call.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace ppfsdp::comm {
namespace {

std::string difference(const std::vector<Call>& calls, const std::vector<int>& names) {
  const int n = static_cast<int>(calls.size());
  std::vector<int64_t> encoded(n * encoded_size(n));
  for (int rank = 0; rank < n; ++rank) {
    encode(calls[rank], n, encoded.data() + rank * encoded_size(n));
  }
  return find_difference(encoded.data(), n, names).value_or("");
}

const Call kReduce = {.kind = Call::Kind::kAllReduce, .dtype = at::kFloat, .count = 10};

TEST(Call, EqualCallsDoNotDiffer) {
  EXPECT_EQ(difference({kReduce, kReduce, kReduce}, {0, 1, 2}), "");
}

TEST(Call, EveryFieldCounts) {
  // A field left out of the encoding would let ranks that differ in it alone go on.
  std::vector<Call> others(7, kReduce);
  others[0].kind = Call::Kind::kBroadcast;
  others[1].dtype = at::kHalf;
  others[2].op = ReduceOp::avg();
  others[3].op.factor = 0.5;
  others[4].root = 1;
  others[5].count = 11;
  others[6].label = "layers.0";
  for (const Call& other : others) {
    EXPECT_EQ(difference({kReduce, other, kReduce}, {0, 1, 2}).substr(0, 14), "rank 1 differs");
  }
}

TEST(Call, TheMinorityDiffersAndIsNamedByItsWorldRank) {
  Call other = kReduce;
  other.count = 12;
  EXPECT_EQ(difference({other, kReduce, kReduce}, {4, 6, 8}),
            "rank 4 differs: it calls all_reduce of 12 Float by sum, rank 6 calls all_reduce of 10 "
            "Float by sum");
}

TEST(Call, LabelsAreToldAndCountInFull) {
  Call first = kReduce, second = kReduce;
  first.label = "layers.0";
  second.label = "layers.1";
  EXPECT_EQ(difference({first, first, second}, {0, 1, 2}),
            "rank 2 differs: it calls all_reduce of 10 Float by sum for 'layers.1', rank 0 calls "
            "all_reduce of 10 Float by sum for 'layers.0'");
  EXPECT_EQ(difference({second, second}, {0, 1}), "");
  // What is too long to send still counts; of its text the end is told.
  first.label = "a" + std::string(100, 'x');
  second.label = "b" + std::string(100, 'x');
  EXPECT_EQ(difference({first, second}, {0, 1}),
            "rank 1 differs: it calls all_reduce of 10 Float by sum for '" + std::string(64, 'x') +
                "', rank 0 calls all_reduce of 10 Float by sum for '" + std::string(64, 'x') + "'");
  EXPECT_NE(hash("abcdefgh"), hash(std::string_view("abcdefgh\0", 9)));
}

TEST(Call, SplitsMatchAcrossTheDiagonal) {
  Call first = {.kind = Call::Kind::kAllToAll, .dtype = at::kLong};
  Call second = first;
  first.sends = {1, 2};
  first.receives = {1, 3};
  second.sends = {3, 4};
  second.receives = {2, 4};
  EXPECT_EQ(difference({first, second}, {0, 1}), "");
  second.receives = {4, 4};
  EXPECT_EQ(difference({first, second}, {0, 1}),
            "rank 0 sends 2 elements to rank 1, which expects 4");
}

TEST(Call, MembersThatListEachOtherMustAgree) {
  const auto subgroup = [](std::vector<int64_t> members) {
    return Call{.kind = Call::Kind::kSubgroup, .sends = std::move(members)};
  };
  const Call left = subgroup({1, 1, 0});
  EXPECT_EQ(difference({left, left, subgroup({0, 0, 1})}, {0, 1, 2}), "");
  EXPECT_EQ(difference({left, left, subgroup({0, 1, 1})}, {0, 1, 5}),
            "rank 5 passes the members [1, 5], but rank 1 passes [0, 1]");
}

TEST(Call, MembersMustAgreeInTheNewGroupsName) {
  const auto subgroup = [](std::vector<int64_t> members, const char* name) {
    return Call{.kind = Call::Kind::kSubgroup, .sends = std::move(members), .label = name};
  };
  // Those of different groups need not.
  EXPECT_EQ(difference({subgroup({1, 0}, "left"), subgroup({0, 1}, "right")}, {0, 1}), "");
  EXPECT_EQ(difference({subgroup({1, 1}, "left"), subgroup({1, 1}, "right")}, {4, 6}),
            "rank 4 calls the new group 'left', but rank 6 calls it 'right'");
}

TEST(Call, TagsOfNeighbouringValuesAreDistinct) {
  // Transfers under way at once have tags of nearby numbers, ranks and sizes; of two with one tag
  // the peer's would be mistaken for each other.
  std::set<uint32_t> tags;
  for (uint64_t number = 0; number < 20; ++number) {
    for (uint64_t rank = 0; rank < 8; ++rank) {
      for (uint64_t count = 0; count < 20; ++count) {
        const uint32_t tag = make_tag({number, rank, count});
        EXPECT_LT(tag, uint32_t{1} << 31);
        tags.insert(tag);
      }
    }
  }
  EXPECT_EQ(tags.size(), 20u * 8 * 20);
  EXPECT_NE(hash({1, 2}), hash({2, 1}));
  EXPECT_NE(hash({0}), hash({0, 0}));
}

}  // namespace
}  // namespace ppfsdp::comm
