#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "src/comm/communicator.h"
#include "src/comm/reduction.h"
#include "src/comm/stream.h"

namespace ppfsdp::comm {

/// Bytes that the storage under `tensor` needs for its offset, sizes and strides.
size_t storage_bytes(const at::Tensor& tensor);

enum class StreamPriority { kNormal, kHigh };

/// The figures of a GPU that decide how its random kernels spread values over a tensor, from
/// cudaDeviceProp: multiProcessorCount and maxThreadsPerMultiProcessor.
struct DeviceGrid {
  int64_t multiprocessors = 0;
  int64_t threads_per_multiprocessor = 0;
};

/// Memory of a rank's device: on a GPU what its allocator holds for tensors, else the process's.
struct MemoryUse {
  int64_t peak_bytes = 0;   ///< the most so far
  int64_t total_bytes = 0;  ///< that there is
};

/// What the code of one rank has of the world it runs in: the only way to a backend. One a rank,
/// used on that rank's thread.
class Runtime {
 public:
  virtual ~Runtime() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  /// Where this rank's parameters live.
  virtual c10::Device device() const = 0;
  /// "sim", "gloo", "nccl", "single": for messages and metrics only; code must not branch on it.
  virtual std::string backend() const = 0;
  /// How this backend folds, for references that must match it bit for bit.
  virtual ReductionOrder reduction_order() const = 0;

  /// The group of all ranks.
  virtual const CommunicatorPtr& world() = 0;

  /// The stream on which this rank's LibTorch operations run.
  virtual Stream& compute_stream() = 0;
  virtual std::shared_ptr<Stream> create_stream(const std::string& name,
                                                StreamPriority priority) = 0;

  /// This rank's own generator: what a random op on a DTensor draws from when it is given none.
  /// LibTorch's default generator of device() (the CPU's for meta) where a rank is a process; where
  /// ranks share a process, each has a copy, made when the rank started, so that ranks draw the
  /// same values in whatever order they run.
  virtual at::Generator default_generator();

  /// An error on a device that is no GPU.
  virtual DeviceGrid device_grid() const;

  virtual MemoryUse memory_use() const;

  /// Frees the memory under `tensor` in place (its storage shrinks to 0 bytes; sizes and version
  /// counter stay), so that views and tensors saved for backward come back to life with
  /// alloc_storage. The storage must be owned by one parameter: nothing else may read it until
  /// then.
  virtual void free_storage(const at::Tensor& tensor);
  /// Gives the storage under `tensor` memory for its sizes again; its contents are undefined (NaN
  /// on the simulated mesh). Does nothing when the storage is large enough already.
  virtual void alloc_storage(const at::Tensor& tensor);
};

}  // namespace ppfsdp::comm
