#include "backends/nccl/gpu/profile.h"

#include <ATen/ops/ones.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <set>
#include <string_view>
#include <tuple>

namespace ppfsdp::nccl::testing {
namespace {

namespace profiler = torch::autograd::profiler;

constexpr std::string_view kStep = "ppfsdp: step";
constexpr std::string_view kControl = "ppfsdp: control";

/// Of the CUDA runtime's calls those that return only when the device has done something. Its calls
/// appear in the profile under their names; LibTorch's own operations have others.
bool makes_the_host_wait(std::string_view call) {
  return (call.starts_with("cu") && call.ends_with("Synchronize")) || call == "cudaMemcpy" ||
         call == "cudaFree";
}

struct Range {
  int64_t begin = 0, end = 0;
  bool holds(int64_t time) const { return begin <= time && time <= end; }
};

Range range_of(const std::vector<profiler::KinetoEvent>& events, std::string_view name) {
  for (const profiler::KinetoEvent& event : events) {
    if (event.deviceType() == c10::kCPU && event.name() == name) {
      return {static_cast<int64_t>(event.startNs()), static_cast<int64_t>(event.endNs())};
    }
  }
  TORCH_CHECK(false, "the profile has no range '", name, "'");
}

}  // namespace

Profile profile(const std::string& name, comm::Runtime& runtime,
                const std::function<void()>& step) {
  const profiler::ProfilerConfig config(profiler::ProfilerState::KINETO);
  std::set<profiler::ActivityType> activities = {profiler::ActivityType::CPU};
  if (runtime.device().is_cuda()) activities.insert(profiler::ActivityType::CUDA);
  runtime.compute_stream().synchronize();
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities);
  {
    RECORD_USER_SCOPE(std::string(kStep));
    step();
  }
  {
    // What the step has queued on other streams is waited for by the compute stream within it.
    RECORD_USER_SCOPE(std::string(kControl));
    runtime.compute_stream().synchronize();
    // The backend asks the device again and again rather than block in CUDA; LibTorch blocks.
    at::ones({1}, runtime.device()).item<float>();
  }
  const std::unique_ptr<profiler::ProfilerResult> result = profiler::disableProfiler();
  if (const char* folder = std::getenv("TEST_UNDECLARED_OUTPUTS_DIR")) {
    result->save(fmt::format("{}/{}.json", folder, name));
  }

  Profile profile;
  const Range inside = range_of(result->events(), kStep);
  const Range control = range_of(result->events(), kControl);
  for (const profiler::KinetoEvent& event : result->events()) {
    const std::string what = event.name();
    const auto begin = static_cast<int64_t>(event.startNs());
    const auto end = static_cast<int64_t>(event.endNs());
    if (event.deviceType() == c10::kCPU) {
      if (!makes_the_host_wait(what)) continue;
      if (inside.holds(begin)) profile.waits.push_back(what);
      if (control.holds(begin)) profile.control.push_back(what);
    } else if (event.deviceIndex() == runtime.device().index() && begin >= inside.begin &&
               end > begin && what != kStep && what != kControl) {
      // The ranges are there on the device's side too, round what was queued in them.
      profile.device.push_back({what, event.deviceResourceId(), begin, end});
    }
  }
  std::ranges::sort(profile.device, {}, [](const Interval& interval) {
    return std::tie(interval.begin, interval.stream);
  });
  return profile;
}

int64_t busiest_stream(const std::vector<Interval>& intervals) {
  TORCH_CHECK(!intervals.empty(), "nothing ran on the device");
  std::map<int64_t, int64_t> busy;
  for (const Interval& interval : intervals) busy[interval.stream] += interval.end - interval.begin;
  return std::ranges::max_element(busy, {}, [](const auto& entry) { return entry.second; })->first;
}

Overlap overlap(const std::vector<Interval>& what, const std::vector<Interval>& others) {
  Overlap result;
  for (const Interval& one : what) {
    ++result.count;
    result.total += one.end - one.begin;
    // The others' times within this one, joined where they lie over each other.
    std::vector<std::pair<int64_t, int64_t>> shared;
    for (const Interval& other : others) {
      const int64_t begin = std::max(one.begin, other.begin), end = std::min(one.end, other.end);
      if (other.stream != one.stream && begin < end) shared.emplace_back(begin, end);
    }
    std::ranges::sort(shared);
    int64_t together = 0, covered = one.begin;
    for (const auto& [begin, end] : shared) {
      together += std::max<int64_t>(0, end - std::max(begin, covered));
      covered = std::max(covered, end);
    }
    result.together += together;
    if (together > 0) ++result.overlapped;
  }
  return result;
}

std::string to_string(const Overlap& overlap) {
  const double share =
      overlap.total == 0 ? 0 : 100.0 * static_cast<double>(overlap.together) / overlap.total;
  return fmt::format("{} of {}, {:.0f} % of {:.3f} ms", overlap.overlapped, overlap.count, share,
                     static_cast<double>(overlap.total) * 1e-6);
}

}  // namespace ppfsdp::nccl::testing
