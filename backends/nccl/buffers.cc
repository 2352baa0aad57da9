#include "backends/nccl/buffers.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <nccl.h>

#include <exception>
#include <optional>

namespace ppfsdp::nccl {
namespace {

/// Sizes that differ by less share buffers; what NCCL allocates is coarser anyway.
constexpr size_t kRounding = 4096;

}  // namespace

at::Tensor BufferPool::allocate(int64_t numel, at::ScalarType dtype, const c10::Stream& stream) {
  const size_t bytes = static_cast<size_t>(numel) * c10::elementSize(dtype);
  const Size size{stream.id(), (bytes + kRounding - 1) / kRounding * kRounding};
  void* memory = nullptr;
  c10::Device device(c10::kCPU);
  {
    const std::lock_guard lock(mutex_);
    if (handle_ == nullptr || unsupported_) return {};
    device = endpoint_->settings.tensors;
    if (const auto idle = idle_.find(size); idle != idle_.end() && !idle->second.empty()) {
      memory = idle->second.back();
      idle->second.pop_back();
    } else {
      Buffer buffer;
      bool made = make(size, buffer);
      if (!made && !buffers_.empty()) {
        // The device may be full of what this pool keeps.
        wait_for_idle();
        free_idle();
        made = make(size, buffer);
      }
      if (!made) {
        unsupported_ = buffers_.empty();
        return {};
      }
      memory = buffer.memory;
      buffers_.emplace(memory, buffer);
    }
  }
  return at::for_blob(memory, {numel})
      .deleter([pool = shared_from_this()](void* memory) { pool->give_back(memory); })
      .options(at::TensorOptions(dtype).device(device))
      .target_device(device)
      .make_tensor();
}

bool BufferPool::make(Size size, Buffer& buffer) {
  buffer.size = size;
  // NCCL takes it from the device that is current.
  const c10::DeviceGuard on_device(endpoint_->settings.streams);
  if (ncclMemAlloc(&buffer.memory, size.second) != ncclSuccess) return false;
  const ncclResult_t result = handle_->try_call([&](ncclComm_t comm) {
    return ncclCommRegister(comm, buffer.memory, size.second, &buffer.registration);
  });
  if (result == ncclSuccess) return true;
  ncclMemFree(buffer.memory);
  return false;
}

void BufferPool::deregister(Buffer& buffer) {
  if (handle_ == nullptr || buffer.registration == nullptr) return;
  try {
    handle_->try_call(
        [&](ncclComm_t comm) { return ncclCommDeregister(comm, buffer.registration); });
  } catch (const std::exception&) {
    // The communicator was aborted, and its registrations went with it.
  }
  buffer.registration = nullptr;
}

void BufferPool::wait_for_idle() {
  // Work on memory's stream, and on those that it has waited for, goes on after the last tensor has
  // gone; unmapping does not wait for it as cudaFree does.
  std::optional<c10::StreamId> last;
  for (const auto& [size, memories] : idle_) {
    if (memories.empty() || last == size.first) continue;
    last = size.first;
    const c10::Stream stream(c10::Stream::UNSAFE, endpoint_->settings.streams, size.first);
    endpoint_->host_wait(*endpoint_->events->record(stream));
  }
}

void BufferPool::free_idle() {
  for (auto& [size, memories] : idle_) {
    for (void* const memory : memories) {
      const auto buffer = buffers_.find(memory);
      deregister(buffer->second);
      ncclMemFree(memory);
      buffers_.erase(buffer);
    }
  }
  idle_.clear();
}

void BufferPool::give_back(void* memory) {
  const std::lock_guard lock(mutex_);
  const auto buffer = buffers_.find(memory);
  if (handle_ != nullptr) {
    idle_[buffer->second.size].push_back(memory);
  } else {
    ncclMemFree(memory);
    buffers_.erase(buffer);
  }
}

void BufferPool::close() {
  const std::lock_guard lock(mutex_);
  if (handle_ == nullptr) return;
  free_idle();
  for (auto& [memory, buffer] : buffers_) deregister(buffer);
  handle_ = nullptr;
  endpoint_ = nullptr;
}

size_t BufferPool::made() const {
  const std::lock_guard lock(mutex_);
  return buffers_.size();
}

size_t BufferPool::idle() const {
  const std::lock_guard lock(mutex_);
  size_t count = 0;
  for (const auto& [size, memories] : idle_) count += memories.size();
  return count;
}

}  // namespace ppfsdp::nccl
