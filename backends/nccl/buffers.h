#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "backends/nccl/endpoint.h"
#include "backends/nccl/handle.h"

namespace ppfsdp::nccl {

/// Memory from ncclMemAlloc, registered with one communicator, so that NCCL copies from and to it
/// without staging. What tensors give back is kept for the next one of that size on that stream,
/// whose work comes after theirs: no other order is needed. Any thread; tensors may outlive the
/// pool, its communicator and the runtime. Made by std::make_shared.
class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  BufferPool(std::shared_ptr<Endpoint> endpoint, std::shared_ptr<Handle> handle)
      : endpoint_(std::move(endpoint)), handle_(std::move(handle)) {}
  ~BufferPool() { close(); }

  /// A 1-D tensor of `numel` > 0 elements without values, for use on `stream`. Undefined when NCCL
  /// has no such memory here: then it is not asked again. When the device is full, the host waits
  /// for the work on what is idle, and that is freed.
  at::Tensor allocate(int64_t numel, at::ScalarType dtype, const c10::Stream& stream);

  /// Takes all buffers out of the communicator, which must still be there unless the rank has
  /// failed, and frees those that no tensor uses; the others go with their tensors.
  void close();

  /// Buffers that were made and are not freed, and those of them that no tensor uses.
  size_t made() const;
  size_t idle() const;

 private:
  /// Rounded bytes on a stream.
  using Size = std::pair<c10::StreamId, size_t>;
  struct Buffer {
    void* memory = nullptr;
    void* registration = nullptr;
    Size size;
  };

  /// mutex_ is held.
  bool make(Size size, Buffer& buffer);
  void wait_for_idle();
  void free_idle();
  void deregister(Buffer& buffer);
  void give_back(void* memory);

  mutable std::mutex mutex_;
  /// All guarded by mutex_. Null once closed.
  std::shared_ptr<Endpoint> endpoint_;
  std::shared_ptr<Handle> handle_;
  bool unsupported_ = false;
  std::map<void*, Buffer> buffers_;
  std::map<Size, std::vector<void*>> idle_;
};

}  // namespace ppfsdp::nccl
