#include "backends/start/agreement.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "src/comm/call.h"

namespace ppfsdp::start {
namespace {

constexpr size_t kHash = sizeof(uint64_t);

void append(std::vector<uint8_t>& bytes, uint64_t number) {
  const auto* data = reinterpret_cast<const uint8_t*>(&number);
  bytes.insert(bytes.end(), data, data + sizeof(number));
}

void append(std::vector<uint8_t>& bytes, const std::string& text) {
  append(bytes, text.size());
  bytes.insert(bytes.end(), text.begin(), text.end());
}

std::string take_text(const std::vector<uint8_t>& bytes, size_t& at) {
  uint64_t size = 0;
  TORCH_CHECK(bytes.size() - at >= sizeof(size), "facts are cut short");
  std::memcpy(&size, bytes.data() + at, sizeof(size));
  at += sizeof(size);
  TORCH_CHECK(size <= bytes.size() - at, "facts are cut short");
  const auto* data = reinterpret_cast<const char*>(bytes.data()) + at;
  at += size;
  return std::string(data, size);
}

/// The hash of a rank's fact; of no bytes beyond its last.
std::vector<uint8_t> hash_at(const std::vector<uint8_t>& hashes, size_t index) {
  const size_t from = std::min(index * kHash, hashes.size());
  const size_t to = std::min(from + kHash, hashes.size());
  return {hashes.begin() + static_cast<std::ptrdiff_t>(from),
          hashes.begin() + static_cast<std::ptrdiff_t>(to)};
}

/// The last place up to `at` where a character of UTF-8 begins.
size_t character_at(const std::string& text, size_t at) {
  while (at > 0 && at < text.size() && (static_cast<unsigned char>(text[at]) & 0xc0) == 0x80) --at;
  return at;
}

/// At most `kMost` bytes of `text`, from a little before `telling`, where what matters begins.
std::string shorten(const std::string& text, size_t telling = 0) {
  constexpr size_t kMost = 120, kBefore = 40;
  if (text.empty()) return "nothing";
  if (text.size() <= kMost) return text;
  const size_t from = telling + kBefore < kMost ? 0 : character_at(text, telling - kBefore);
  const size_t to = character_at(text, std::min(from + kMost, text.size()));
  return fmt::format("{}{}{}", from > 0 ? "..." : "", text.substr(from, to - from),
                     to < text.size() ? "..." : "");
}

/// How many bytes at the front are the same in all values.
size_t common_front(const std::vector<Fact>& facts) {
  size_t size = facts[0].value.size();
  for (const Fact& fact : facts) {
    const auto end = std::ranges::mismatch(facts[0].value, fact.value).in1;
    size = std::min(size, static_cast<size_t>(end - facts[0].value.begin()));
  }
  return size;
}

}  // namespace

std::vector<uint8_t> encode_hashes(const std::vector<Fact>& facts) {
  std::vector<uint8_t> bytes;
  for (const Fact& fact : facts) {
    append(bytes, comm::hash({comm::hash(fact.name), comm::hash(fact.value)}));
  }
  return bytes;
}

std::vector<uint8_t> encode_facts(const std::vector<Fact>& facts) {
  std::vector<uint8_t> bytes;
  for (const Fact& fact : facts) {
    append(bytes, fact.name);
    append(bytes, fact.value);
  }
  return bytes;
}

std::vector<Fact> decode_facts(const std::vector<uint8_t>& bytes) {
  std::vector<Fact> facts;
  for (size_t at = 0; at < bytes.size();) {
    std::string name = take_text(bytes, at);
    std::string value = take_text(bytes, at);
    facts.push_back({std::move(name), std::move(value)});
  }
  return facts;
}

std::optional<Difference> find_difference(const std::vector<std::vector<uint8_t>>& hashes) {
  const auto differs = [&](const std::vector<uint8_t>& other) { return other != hashes[0]; };
  if (std::ranges::none_of(hashes, differs)) return std::nullopt;
  for (size_t index = 0;; ++index) {
    std::map<std::vector<uint8_t>, std::vector<int>> groups;
    for (size_t rank = 0; rank < hashes.size(); ++rank) {
      groups[hash_at(hashes[rank], index)].push_back(static_cast<int>(rank));
    }
    if (groups.size() == 1) continue;
    Difference difference{index, {}};
    for (auto& [hash, ranks] : groups) difference.groups.push_back(std::move(ranks));
    std::ranges::sort(difference.groups, [](const auto& a, const auto& b) {
      return a.size() != b.size() ? a.size() > b.size() : a[0] < b[0];
    });
    return difference;
  }
}

std::string describe(const Difference& difference, const std::vector<std::vector<Fact>>& facts) {
  const size_t shown = std::min(difference.groups.size(), kShownGroups);
  TORCH_CHECK(facts.size() == shown, "describe: facts of ", shown, " ranks are needed, got ",
              facts.size());
  std::vector<Fact> got;
  for (const std::vector<Fact>& all : facts) {
    got.push_back(difference.index < all.size() ? all[difference.index] : Fact{});
  }
  const auto other_name = [&](const Fact& fact) { return fact.name != got[0].name; };
  const bool one_name = std::ranges::none_of(got, other_name);
  const size_t telling = common_front(got);
  std::vector<std::string> parts;
  for (size_t i = 0; i < shown; ++i) {
    const std::vector<int>& ranks = difference.groups[i];
    const std::string name = one_name ? "" : shorten(got[i].name) + " = ";
    parts.push_back(fmt::format("{}{} on {} {}", name, shorten(got[i].value, telling),
                                ranks.size() == 1 ? "rank" : "ranks", list_ranks(ranks)));
  }
  if (difference.groups.size() > shown) {
    parts.push_back(fmt::format("{} more on the others", difference.groups.size() - shown));
  }
  return fmt::format("ranks differ{}: {}", one_name ? " in " + got[0].name : "",
                     fmt::join(parts, "; "));
}

std::string list_ranks(const std::vector<int>& ranks) {
  constexpr size_t kMost = 10;
  std::vector<std::string> items;
  for (size_t i = 0; i < ranks.size();) {
    if (items.size() == kMost) {
      items.push_back(fmt::format("... ({} in all)", ranks.size()));
      break;
    }
    size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    // Two in a row are two items.
    if (end - i > 2) {
      items.push_back(fmt::format("{}-{}", ranks[i], ranks[end - 1]));
      i = end;
    } else {
      items.push_back(fmt::format("{}", ranks[i++]));
    }
  }
  return fmt::format("{}", fmt::join(items, ", "));
}

}  // namespace ppfsdp::start
