#include "backends/nccl/fake/fake_memory.h"

#include <ATen/record_function.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/impl/alloc_cpu.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "backends/nccl/fake/fake_device.h"

namespace ppfsdp::nccl::testing {
namespace {

/// Of tensors' memory, as LibTorch's own allocator keeps it.
constexpr size_t kAlignment = 64;

/// Stands before each block.
struct alignas(kAlignment) Header {
  size_t bytes = 0;
  /// 0: no stream's.
  uint64_t world = 0;
  std::vector<FakeStream*> streams;
};

Header* header_of(void* data) { return static_cast<Header*>(data) - 1; }

void give_back(void* data) {
  if (data == nullptr) return;
  Header* header = header_of(data);
  FakeDevices* devices = FakeDevices::active();
  std::vector<StreamPoint> points;
  const bool ours = devices != nullptr && header->world == devices->world();
  if (ours) {
    for (const FakeStream* stream : header->streams) points.push_back(stream->end());
  }
  const size_t bytes = sizeof(Header) + header->bytes;
  header->~Header();
  if (ours) {
    devices->free_after(header, bytes, std::move(points));
  } else {
    c10::free_cpu(header);
  }
}

class StreamAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    if (bytes > 0) {
      auto* header = new (c10::alloc_cpu(sizeof(Header) + bytes)) Header{bytes, 0, {}};
      data = header + 1;
      if (FakeStream* stream = current_stream(); stream != nullptr) {
        header->streams.push_back(stream);
        header->world = FakeDevices::active()->world();
        std::memset(data, 0xff, bytes);
      }
    }
    return {data, data, &give_back, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

std::unique_ptr<at::ObserverContext> before_operation(const at::RecordFunction& function) {
  FakeStream* stream = current_stream();
  if (stream == nullptr) return nullptr;
  const char* name = function.name();
  if (std::strncmp(name, "aten::empty", std::strlen("aten::empty")) == 0) return nullptr;
  FakeDevices& devices = *FakeDevices::active();
  if (const StreamPoint end = stream->end(); !end.reached()) {
    auto held = devices.lock();
    devices.wait(held, end);
  }
  if (std::strcmp(name, "aten::_local_scalar_dense") == 0) {
    devices.count(&HostWaits::scalars);
  }
  return nullptr;
}

}  // namespace

void own_tensor_memory() {
  // Never destroyed: tensors of static variables are freed after it would be.
  static c10::Allocator* allocator = [] {
    c10::Allocator* made = new StreamAllocator();
    c10::SetCPUAllocator(made);
    return made;
  }();
  static_cast<void>(allocator);
}

void use_on_stream(const c10::DataPtr& memory, FakeStream& stream) {
  if (memory.get_deleter() != &give_back || memory.get() == nullptr) return;
  std::vector<FakeStream*>& streams = header_of(memory.get())->streams;
  if (std::find(streams.begin(), streams.end(), &stream) == streams.end()) {
    streams.push_back(&stream);
  }
}

void observe_operations(bool observe) {
  static at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;
  if (observe) {
    handle = at::addGlobalCallback(
        at::RecordFunctionCallback(&before_operation).scopes({at::RecordScope::FUNCTION}));
  } else {
    at::removeCallback(handle);
  }
}

}  // namespace ppfsdp::nccl::testing
