#include "backends/nccl/report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstddef>
#include <nlohmann/json.hpp>
#include <utility>

#include "backends/start/agreement.h"

namespace ppfsdp::nccl {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;
using std::chrono::system_clock;

std::string whole_seconds(milliseconds duration) {
  return fmt::format("{} s", std::chrono::duration_cast<std::chrono::seconds>(duration).count());
}

}  // namespace

std::string to_text(const Report& report) {
  json groups = json::object();
  for (const auto& [key, progress] : report.groups) {
    groups[key] = {progress.issued, progress.finished, progress.last};
  }
  const auto time =
      std::chrono::duration_cast<milliseconds>(report.time.time_since_epoch()).count();
  const json whole = {
      {"beat", report.beat}, {"time_ms", time}, {"left", report.left}, {"groups", groups}};
  // Labels are the user's and need not be UTF-8.
  return whole.dump(-1, ' ', false, json::error_handler_t::replace);
}

std::optional<Report> report_from(const std::string& text) {
  try {
    const json whole = json::parse(text);
    Report report;
    report.beat = whole.at("beat").get<uint64_t>();
    report.time = system_clock::time_point(milliseconds(whole.at("time_ms").get<int64_t>()));
    report.left = whole.at("left").get<bool>();
    for (const auto& [key, progress] : whole.at("groups").items()) {
      report.groups[key] = {progress.at(0).get<uint64_t>(), progress.at(1).get<uint64_t>(),
                            progress.at(2).get<std::string>()};
    }
    return report;
  } catch (const json::exception&) {
    return std::nullopt;
  }
}

std::string name_ranks(const std::vector<int>& ranks) {
  return fmt::format("{} {}", ranks.size() == 1 ? "rank" : "ranks", start::list_ranks(ranks));
}

std::string describe_others(const Group& group, const Progress& mine,
                            const std::map<int, Report>& reports, system_clock::time_point now,
                            milliseconds fresh) {
  // What ranks say, in the order of the first that says it.
  std::vector<std::pair<std::string, std::vector<int>>> said;
  std::vector<int> with_me;
  const auto say = [&](int rank, const std::string& text) {
    for (auto& [known, ranks] : said) {
      if (known == text) return ranks.push_back(rank);
    }
    said.push_back({text, {rank}});
  };
  for (const int rank : group.ranks) {
    if (rank == group.rank()) continue;
    const auto found = reports.find(rank);
    if (found == reports.end()) {
      say(rank, "never reported");
      continue;
    }
    const Report& report = found->second;
    const auto age = std::chrono::duration_cast<milliseconds>(now - report.time);
    std::string text;
    if (report.left) {
      text = "ended its work; it ";
    } else if (age > fresh) {
      text = fmt::format("has not reported for {}; it ", whole_seconds(age));
    }
    const auto progress = report.groups.find(group.key);
    if (progress == report.groups.end() || progress->second.issued == 0) {
      say(rank, text + "had issued none of the group's operations");
      continue;
    }
    const Progress& theirs = progress->second;
    if (text.empty() && theirs == mine) {
      with_me.push_back(rank);
      continue;
    }
    text += fmt::format("last issued operation {}, {}, ", theirs.issued - 1, theirs.last);
    text += theirs.finished == 0 ? std::string("and has finished none")
                                 : fmt::format("and has finished {}", theirs.finished - 1);
    say(rank, text);
  }
  std::vector<std::string> parts;
  for (const auto& [text, ranks] : said) {
    parts.push_back(fmt::format("{} {}", name_ranks(ranks), text));
  }
  if (!with_me.empty()) {
    parts.push_back(fmt::format("{} {} where this rank is", name_ranks(with_me),
                                with_me.size() == 1 ? "is" : "are"));
  }
  return fmt::format("{}", fmt::join(parts, "; "));
}

}  // namespace ppfsdp::nccl
