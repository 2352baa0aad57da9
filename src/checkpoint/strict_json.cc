#include "src/checkpoint/strict_json.h"

#include <c10/util/Exception.h>

#include <unordered_set>
#include <vector>

namespace ppfsdp::checkpoint {
namespace {

using Json = nlohmann::json;

constexpr size_t kMostLevels = 16;

std::string shortened(std::string text) {
  constexpr size_t kMost = 200;
  if (text.size() > kMost) text = text.substr(0, kMost) + "...";
  return text;
}

/// Sees each piece of a text and throws for what is wrong. (A callback of Json::parse would do, but
/// makes it look through all members of an object for each that is one itself.)
class Checker : public nlohmann::json_sax<Json> {
 public:
  Checker(const std::string& place, uint64_t offset) : place_(place), offset_(offset) {}

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t& value) override { return check_characters(value); }
  bool binary(binary_t&) override { return true; }
  bool start_object(size_t) override { return begin(); }
  bool end_object() override { return end(); }
  bool start_array(size_t) override { return begin(); }
  bool end_array() override { return end(); }

  bool key(string_t& name) override {
    check_characters(name);
    TORCH_CHECK(names_.back().insert(name).second, place_, " names '", shortened(name), "' twice");
    return true;
  }

  bool parse_error(size_t read, const std::string&, const Json::exception& error) override {
    // The byte in question is the last one read.
    TORCH_CHECK(false, place_, " is not JSON at offset ", offset_ + (read == 0 ? 0 : read - 1),
                ": ", shortened(error.what()));
    return false;
  }

 private:
  bool check_characters(const std::string& text) {
    // It would end the text of a path or message.
    TORCH_CHECK(text.find('\0') == std::string::npos, place_, " has a string with U+0000 in it");
    return true;
  }
  bool begin() {
    // What walks through a value afterwards goes down by recursion.
    TORCH_CHECK(names_.size() < kMostLevels, place_, " is nested deeper than ", kMostLevels,
                " levels");
    names_.emplace_back();
    return true;
  }
  bool end() {
    names_.pop_back();
    return true;
  }

  const std::string& place_;
  uint64_t offset_;
  /// Of each object that is open; of a list none.
  std::vector<std::unordered_set<std::string>> names_;
};

}  // namespace

Json parse_strictly(std::string_view text, const std::string& place, uint64_t offset) {
  Checker checker(place, offset);
  Json::sax_parse(text.begin(), text.end(), &checker);
  return Json::parse(text.begin(), text.end());
}

std::string shown(const Json& value) { return shortened(value.dump()); }

}  // namespace ppfsdp::checkpoint
