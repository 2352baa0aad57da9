#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ppfsdp::start {

/// Something that must be the same on all ranks before they communicate: the code that they run, a
/// key of the config.
struct Fact {
  std::string name;
  std::string value;
  bool operator==(const Fact&) const = default;
};

/// A hash of each fact's name and value, 8 bytes each: what ranks compare. Two different facts have
/// one hash with a chance of 2^-64.
std::vector<uint8_t> encode_hashes(const std::vector<Fact>& facts);

/// The facts as bytes, for those who want to know what is behind a hash.
std::vector<uint8_t> encode_facts(const std::vector<Fact>& facts);
std::vector<Fact> decode_facts(const std::vector<uint8_t>& bytes);

/// The first fact that ranks differ in.
struct Difference {
  size_t index = 0;
  /// Ranks that agree with each other, those of most ranks first, else those of the lowest rank.
  std::vector<std::vector<int>> groups;
};

/// `hashes`: encode_hashes() of each rank, by rank. Nothing when all are equal.
std::optional<Difference> find_difference(const std::vector<std::vector<uint8_t>>& hashes);

/// How many groups describe() shows, each with its ranks.
inline constexpr size_t kShownGroups = 4;

/// "ranks differ in training.steps: 3 on ranks 0, 2; 4 on rank 1". `facts`: those of one rank of
/// each of the first kShownGroups groups.
std::string describe(const Difference& difference, const std::vector<std::vector<Fact>>& facts);

/// "0-3, 7", at most ten items of rising `ranks`.
std::string list_ranks(const std::vector<int>& ranks);

}  // namespace ppfsdp::start
