#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "backends/nccl/group.h"

namespace ppfsdp::nccl {

/// How far a rank is in a group's operations, counted from its first.
struct Progress {
  uint64_t issued = 0;
  uint64_t finished = 0;
  /// The last that was issued: "all_reduce of 10 Float by sum".
  std::string last;

  bool operator==(const Progress&) const = default;
};

/// What a rank tells the others through the store, again and again.
struct Report {
  /// Counts up, so that a report that is left over can be told from a new one that says the same.
  uint64_t beat = 0;
  /// By the rank's own clock.
  std::chrono::system_clock::time_point time;
  /// The rank has ended its work and will say no more.
  bool left = false;
  /// By the groups' keys.
  std::map<std::string, Progress> groups;
};

std::string to_text(const Report& report);
/// Nothing if the text is none that to_text made.
std::optional<Report> report_from(const std::string& text);

/// What the other members of a group last reported: "rank 2 last issued operation 41, ..., and has
/// finished 40; rank 3 has not reported for 12 s". Ranks that say the same stand together, and
/// those that are where this rank is (`mine`) come last. `reports` holds the reports that were
/// found, by rank in the world; one that was made more than `fresh` before `now` is old.
std::string describe_others(const Group& group, const Progress& mine,
                            const std::map<int, Report>& reports,
                            std::chrono::system_clock::time_point now,
                            std::chrono::milliseconds fresh);

/// "rank 3", "ranks 1-3, 5"; `ranks` ascending, not empty.
std::string name_ranks(const std::vector<int>& ranks);

}  // namespace ppfsdp::nccl
