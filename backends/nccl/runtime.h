#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "src/comm/runtime.h"

namespace ppfsdp::nccl {

/// What only the device at hand can answer or do.
struct Hooks {
  /// comm::Runtime::device_grid and memory_use.
  std::function<comm::DeviceGrid()> device_grid;
  std::function<comm::MemoryUse()> memory_use;
  /// Queues to = from on `stream`, without waiting for it; one of the two is on the host. The
  /// default is Tensor::copy_ under a guard of the stream.
  std::function<void(const at::Tensor& to, const at::Tensor& from, c10::Stream stream)> copy;
};

/// What the runtime of one rank is made of. Nothing here is CUDA's: streams and events are those
/// that LibTorch's device guard of `streams` makes (c10::impl::DeviceGuardImplInterface), and the
/// nccl* functions are those that the program is linked with.
struct Settings {
  int rank = 0;
  int world_size = 1;
  /// Where all ranks meet; each gives its own connection to it (or the same object, in one
  /// process). It must outlive every rank: the runtime on rank 0 waits in its destructor until the
  /// others have said goodbye, two seconds at most.
  c10::intrusive_ptr<c10d::Store> store;

  /// Where tensors are.
  c10::Device tensors = c10::Device(c10::kCUDA, 0);
  /// Whose streams order the work on them: of a GPU the same device.
  c10::Device streams = c10::Device(c10::kCUDA, 0);
  Hooks hooks;
  /// Whether other ranks live in this process, so that this one needs a generator of its own.
  bool shares_process = false;

  /// See NcclOptions.
  std::chrono::milliseconds timeout{std::chrono::minutes(5)};
  uint64_t checked = 256;

  /// How often the watchdog looks at this rank's work, how often it tells the others through the
  /// store what the rank does and asks whether one of them has failed, and after how long without a
  /// sign of life it takes a rank for dead that its own work waits for.
  std::chrono::milliseconds poll{100};
  std::chrono::milliseconds report{1000};
  std::chrono::milliseconds silence{30000};
};

/// comm::Runtime as this backend has it.
class NcclRuntime : public comm::Runtime {
 public:
  /// How often the host has blocked for the device: in Event::synchronize, Stream::synchronize,
  /// barrier, subgroup, in operations whose calls are compared before they start, and where memory
  /// for a group's operations is given up for other memory. A training step whose operations are
  /// past those adds none.
  virtual uint64_t host_waits() const = 0;
};

/// Joins the world: every rank calls it, and it returns when all have (CommError after the
/// timeout). The compute stream is the calling thread's current stream of `settings.streams`.
std::unique_ptr<NcclRuntime> make_runtime(Settings settings);

}  // namespace ppfsdp::nccl
