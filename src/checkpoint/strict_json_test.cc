#include "src/checkpoint/strict_json.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ppfsdp::checkpoint {
namespace {

using ::testing::HasSubstr;

std::string error_of(const std::string& text) {
  try {
    parse_strictly(text, "f: the header", 8);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

TEST(StrictJson, TakesWhatIsJson) {
  EXPECT_EQ(parse_strictly(R"({"a": [{"b": 1}, {"b": 2}], "b": "x"})", "f", 0).dump(),
            R"({"a":[{"b":1},{"b":2}],"b":"x"})");
}

TEST(StrictJson, FaultsSayWhere) {
  EXPECT_THAT(error_of(R"({"x": nonsense})"), HasSubstr("f: the header is not JSON at offset 15"));
  EXPECT_THAT(error_of(R"({"x": 1} 2)"), HasSubstr("not JSON at offset"));
  // nlohmann's error for it is of another class than for the rest.
  EXPECT_THAT(error_of(R"({"x": 1e999})"), HasSubstr("f: the header is not JSON at offset 18"));
}

// A JSON object would keep one of the two.
TEST(StrictJson, NamesThatComeTwice) {
  EXPECT_THAT(error_of(R"({"x": 1, "y": 2, "x": 3})"), HasSubstr("f: the header names 'x' twice"));
  EXPECT_THAT(error_of(R"([{"y": {"x": 1, "x": 1}}])"), HasSubstr("names 'x' twice"));
}

// A few bytes a level would overflow the stack of whoever prints the value.
TEST(StrictJson, NestingHasAnEnd) {
  const auto nested = [](size_t levels) {
    return std::string(levels, '[') + "1" + std::string(levels, ']');
  };
  EXPECT_EQ(error_of(nested(16)), "no error");
  EXPECT_THAT(error_of(nested(17)), HasSubstr("f: the header is nested deeper than 16 levels"));
  EXPECT_THAT(error_of(nested(1000000)), HasSubstr("nested deeper"));
  EXPECT_THAT(error_of(std::string(1000000, '[')), HasSubstr("nested deeper"));
}

// A path or message would end there.
TEST(StrictJson, StringsWithoutNul) {
  EXPECT_THAT(error_of(R"({"a": "b\u0000c"})"),
              HasSubstr("f: the header has a string with U+0000"));
  EXPECT_THAT(error_of(R"({"a\u0000b": 1})"), HasSubstr("f: the header has a string with U+0000"));
}

// As many objects in one as no test's time limit allows a walk through all for each.
TEST(StrictJson, ManyObjects) {
  std::string text = "{";
  for (int i = 0; i < 100000; ++i) text += "\"" + std::to_string(i) + "\":{\"a\":[1]},";
  text.back() = '}';
  EXPECT_EQ(parse_strictly(text, "f", 0).size(), 100000u);
}

// A message is one line to read, also of a file that is none of this kind.
TEST(StrictJson, MessagesStayShort) {
  const std::string long_text(100000, 'a');
  EXPECT_LT(error_of("\"" + long_text).size(), 400u);
  EXPECT_LT(error_of("{\"" + long_text + "\":1,\"" + long_text + "\":1}").size(), 400u);
  EXPECT_LT(shown(long_text).size(), 400u);
  EXPECT_EQ(shown(nlohmann::json::array({1, "b"})), R"([1,"b"])");
}

}  // namespace
}  // namespace ppfsdp::checkpoint
