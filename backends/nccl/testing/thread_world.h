#pragma once

#include <c10/util/intrusive_ptr.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backends/nccl/fake/fake_device.h"
#include "backends/nccl/fake/fake_nccl.h"
#include "backends/nccl/runtime.h"
#include "backends/nccl/testing/rank_store.h"

namespace ppfsdp::nccl::testing {

/// Thrown by a rank's function: its process ends here.
struct ProcessEnds {};

struct ThreadWorldOptions {
  /// But for rank, world size, store and devices. Ranks that fail must end long before a minute.
  Settings settings = {};
  FakeDeviceOptions devices = {};
  /// See FakeNccl.
  int polls = 1;
};

/// Ranks of the NCCL runtime as threads of this process, over fake devices and a fake NCCL: rank r
/// has device r, its tensors lie on the host.
class ThreadWorld {
 public:
  ThreadWorld(int size, const ThreadWorldOptions& options);

  FakeDevices& devices() { return devices_; }
  FakeNccl& nccl() { return nccl_; }
  /// The rank's connection to the store.
  RankStore& store(int rank) { return *stores_[static_cast<size_t>(rank)]; }

  /// Runs `fn` on every rank. The errors of those that failed in their runtime's making or in `fn`
  /// (comm::CommError), by rank, else ""; throws what else a rank throws. A rank that ends by
  /// ProcessEnds does nothing more in NCCL or the store; its runtime is destroyed when the others'
  /// are. Ranks that are not done after a minute end this process.
  std::vector<std::string> run(const std::function<void(NcclRuntime& runtime)>& fn);

  /// What is still there and should not be, and what was done that must not.
  std::vector<std::string> find_faults();

 private:
  const int size_;
  const Settings settings_;
  FakeDevices devices_;
  FakeNccl nccl_;
  std::vector<c10::intrusive_ptr<RankStore>> stores_;
};

/// Runs `fn` on `n` ranks; throws what the first rank to fail throws, and when the world has
/// faults.
void run_threads(int n, const ThreadWorldOptions& options,
                 const std::function<void(NcclRuntime& runtime)>& fn);

}  // namespace ppfsdp::nccl::testing
