#include "backends/nccl/work_log.h"

#include <c10/core/ScalarType.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace ppfsdp::nccl {
namespace {

bool is_message(const What& what) { return what.call.kind == comm::Call::Kind::kMessage; }

}  // namespace

std::string What::to_string() const {
  if (is_message(*this)) {
    return fmt::format("{} of {} {} {} rank {} on group '{}', message {}", sends ? "send" : "recv",
                       call.count, c10::toString(call.dtype), sends ? "to" : "from",
                       group->ranks[peer], group->name, number);
  }
  return fmt::format("{} on group '{}', operation {}", call.to_string(), group->name, number);
}

void WorkLog::add(Work work) {
  const std::lock_guard lock(mutex_);
  if (!is_message(work.what)) groups_[work.what.group.get()].last = work.what;
  works_.push_back({std::move(work)});
  ++running_;
}

bool WorkLog::sweep(const std::function<bool(const Work&)>& done, size_t limit,
                    std::vector<Work>& checks) {
  const std::lock_guard lock(mutex_);
  std::vector<const void*> busy;
  size_t found = 0;
  for (auto entry = works_.begin(); entry != works_.end() && found < limit; ++entry) {
    Work& work = entry->work;
    if (entry->done || std::find(busy.begin(), busy.end(), work.stream) != busy.end()) continue;
    if (!done(work)) {
      busy.push_back(work.stream);
      continue;
    }
    ++found;
    entry->done = true;
    --running_;
    if (!is_message(work.what) && !work.prelude) {
      uint64_t& finished = groups_[work.what.group.get()].finished;
      finished = std::max(finished, work.what.number + 1);
    }
    work.end.reset();
    if (work.check != nullptr) checks.push_back(std::move(work));
  }
  while (!works_.empty() && works_.front().done) works_.pop_front();
  return found == limit;
}

std::optional<What> WorkLog::find_older(std::chrono::steady_clock::time_point time) const {
  const std::lock_guard lock(mutex_);
  // The first that is under way is the oldest.
  for (const Entry& entry : works_) {
    if (entry.done) continue;
    if (entry.work.issued < time) return entry.work.what;
    break;
  }
  return std::nullopt;
}

std::optional<What> WorkLog::find_oldest(const Group& group) const {
  const std::lock_guard lock(mutex_);
  for (const Entry& entry : works_) {
    if (!entry.done && entry.work.what.group.get() == &group) return entry.work.what;
  }
  return std::nullopt;
}

bool WorkLog::empty() const {
  const std::lock_guard lock(mutex_);
  return running_ == 0;
}

std::map<std::string, Progress> WorkLog::progress() const {
  const std::lock_guard lock(mutex_);
  std::map<std::string, Progress> progress;
  for (const auto& [group, counts] : groups_) {
    progress[group->key] = {counts.last.number + 1, counts.finished, counts.last.call.to_string()};
  }
  return progress;
}

}  // namespace ppfsdp::nccl
