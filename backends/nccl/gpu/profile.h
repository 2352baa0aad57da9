#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "src/comm/runtime.h"

namespace ppfsdp::nccl::testing {

/// Something that ran on the device.
struct Interval {
  std::string name;    ///< of a kernel, or "Memcpy ..." or "Memset ..."
  int64_t stream = 0;  ///< CUDA's own number of it
  int64_t begin = 0;   ///< ns
  int64_t end = 0;     ///< ns

  bool operator==(const Interval&) const = default;
};

/// What happened between the beginning of a function and the end of all that it queued.
struct Profile {
  /// On the runtime's device, in order of their beginnings.
  std::vector<Interval> device;
  /// Calls of CUDA that make the host wait, from any thread of the process while the function ran:
  /// "cudaStreamSynchronize", ...
  std::vector<std::string> waits;
  /// The same from a wait that was made on purpose behind the function: none means that the
  /// profiler did not see CUDA's calls.
  std::vector<std::string> control;
};

/// Runs `step` under LibTorch's profiler, and writes all of it as a Chrome trace (for
/// ui.perfetto.dev) to NAME.json in the folder for a test's outputs (TEST_UNDECLARED_OUTPUTS_DIR),
/// if there is one. One at a time in a process.
Profile profile(const std::string& name, comm::Runtime& runtime, const std::function<void()>& step);

/// The stream on which the device was busy longest.
int64_t busiest_stream(const std::vector<Interval>& intervals);

/// How much of `what` lay within times at which one of `others` ran on another stream.
struct Overlap {
  int count = 0;         ///< of `what`
  int overlapped = 0;    ///< those of them that lay so at least in part
  int64_t total = 0;     ///< ns, of all of `what`
  int64_t together = 0;  ///< ns, of them with one of `others`
};
Overlap overlap(const std::vector<Interval>& what, const std::vector<Interval>& others);

/// "11 of 12, 93 % of 1.25 ms".
std::string to_string(const Overlap& overlap);

}  // namespace ppfsdp::nccl::testing
