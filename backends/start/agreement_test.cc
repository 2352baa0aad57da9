#include "backends/start/agreement.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <numeric>

namespace ppfsdp::start {
namespace {

using Facts = std::vector<Fact>;

/// What ranks would say of a world in which rank r holds facts[r].
std::string verdict(const std::vector<Facts>& facts) {
  std::vector<std::vector<uint8_t>> hashes;
  for (const Facts& all : facts) hashes.push_back(encode_hashes(all));
  const std::optional<Difference> difference = find_difference(hashes);
  if (!difference) return "agreed";
  std::vector<Facts> shown;
  for (const std::vector<int>& group : difference->groups) {
    if (shown.size() == kShownGroups) break;
    // As they come from the store.
    shown.push_back(decode_facts(encode_facts(facts[static_cast<size_t>(group[0])])));
  }
  return describe(*difference, shown);
}

TEST(Agreement, EqualFactsAgree) {
  const Facts facts = {{"the build", "1a"}, {"training.steps", "3"}, {"model.weights", ""}};
  EXPECT_EQ(verdict({facts}), "agreed");
  EXPECT_EQ(verdict({facts, facts, facts}), "agreed");
  EXPECT_EQ(verdict({{}, {}}), "agreed");
}

TEST(Agreement, NamesTheFirstFactThatDiffersWithValuesAndRanks) {
  const Facts a = {{"the build", "1a"}, {"training.steps", "3"}, {"optimizer.lr", "0.1"}};
  const Facts b = {{"the build", "1a"}, {"training.steps", "4"}, {"optimizer.lr", "0.2"}};
  EXPECT_EQ(verdict({a, b, a}), "ranks differ in training.steps: 3 on ranks 0, 2; 4 on rank 1");
  // Most ranks first: they are likely right.
  EXPECT_EQ(verdict({b, a, a, a}), "ranks differ in training.steps: 3 on ranks 1-3; 4 on rank 0");
  EXPECT_EQ(verdict({b, a}), "ranks differ in training.steps: 4 on rank 0; 3 on rank 1");
}

TEST(Agreement, ListsThatDifferInLengthOrNamesAreADifference) {
  const Facts a = {{"a", "1"}, {"b", "2"}};
  EXPECT_EQ(verdict({a, {{"a", "1"}}}),
            "ranks differ: b = 2 on rank 0; nothing = nothing on rank 1");
  EXPECT_EQ(verdict({a, {{"a", "1"}, {"c", "2"}}}),
            "ranks differ: b = 2 on rank 0; c = 2 on rank 1");
  EXPECT_EQ(verdict({{{"a", ""}}, {{"a", "x"}}}),
            "ranks differ in a: nothing on rank 0; x on rank 1");
  // A name that ends with its value's beginning.
  EXPECT_NE(verdict({{{"ab", "c"}}, {{"a", "bc"}}}), "agreed");
}

TEST(Agreement, ManyValuesAreCutShort) {
  std::vector<Facts> facts;
  for (int rank = 0; rank < 6; ++rank) facts.push_back({{"x", std::to_string(10 + rank)}});
  EXPECT_EQ(verdict(facts),
            "ranks differ in x: 10 on rank 0; 11 on rank 1; 12 on rank 2; 13 on rank 3; 2 more on "
            "the others");
  const std::string text = verdict({{{"x", std::string(1000, 'y')}}, {{"x", "z"}}});
  EXPECT_LT(text.size(), 200u) << text;
}

// Lists of files differ in their last ones.
TEST(Agreement, OfLongValuesThePartThatDiffersIsShown) {
  std::string front;
  for (int i = 0; i < 500; ++i) front += "é";
  const std::string back(500, 'z');
  EXPECT_EQ(verdict({{{"x", front + "1" + back}}, {{"x", front + "2"}}}),
            fmt::format("ranks differ in x: ...{0}1{1}... on rank 0; ...{0}2 on rank 1",
                        front.substr(0, 40), back.substr(0, 79)));
  // No character is cut in two.
  EXPECT_EQ(verdict({{{"x", front + "y1"}}, {{"x", front + "y2"}}}),
            fmt::format("ranks differ in x: ...{0}y1 on rank 0; ...{0}y2 on rank 1",
                        front.substr(0, 40)));
}

TEST(Agreement, AThousandRanksAreOneLine) {
  std::vector<Facts> facts(1000, Facts{{"x", "1"}});
  facts[417][0].value = "2";
  EXPECT_EQ(verdict(facts), "ranks differ in x: 1 on ranks 0-416, 418-999; 2 on rank 417");
}

TEST(Agreement, RanksAreListedInRuns) {
  EXPECT_EQ(list_ranks({}), "");
  EXPECT_EQ(list_ranks({3}), "3");
  EXPECT_EQ(list_ranks({0, 1}), "0, 1");
  EXPECT_EQ(list_ranks({0, 1, 2, 5, 7, 8, 9, 11}), "0-2, 5, 7-9, 11");
  std::vector<int> odd(50);
  for (int i = 0; i < 50; ++i) odd[static_cast<size_t>(i)] = 2 * i + 1;
  EXPECT_EQ(list_ranks(odd), "1, 3, 5, 7, 9, 11, 13, 15, 17, 19, ... (50 in all)");
}

// They come from other processes, which may be other programs.
TEST(Agreement, FactsThatAreCutShortAreAnError) {
  std::vector<uint8_t> bytes = encode_facts({{"name", "value"}});
  EXPECT_EQ(decode_facts(bytes), (Facts{{"name", "value"}}));
  for (size_t size = 1; size < bytes.size(); ++size) {
    EXPECT_THROW(decode_facts({bytes.begin(), bytes.begin() + static_cast<long>(size)}), c10::Error)
        << size;
  }
  bytes[7] = 0xff;  // a length beyond all memory
  EXPECT_THROW(decode_facts(bytes), c10::Error);
}

}  // namespace
}  // namespace ppfsdp::start
