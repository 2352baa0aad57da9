// c10's interface to devices of type PrivateUse1, over the FakeDevices that lives.
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "backends/nccl/fake/fake_device.h"
#include "backends/nccl/fake/fake_memory.h"

namespace ppfsdp::nccl::testing {
namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

/// What the calling thread has set.
struct ThreadState {
  /// Whose `current` is; of another world it means nothing.
  uint64_t world = 0;
  /// Null is the default stream.
  std::array<FakeStream*, kFakeDevices> current{};
};

ThreadState& this_thread(const FakeDevices& devices) {
  thread_local ThreadState state;
  if (state.world != devices.world()) {
    state.world = devices.world();
    state.current.fill(nullptr);
  }
  return state;
}

thread_local int thread_device = -1;
thread_local bool rank_thread = false;

FakeDevices& living() {
  FakeDevices* devices = FakeDevices::active();
  TORCH_CHECK(devices != nullptr, "there is no FakeDevices, so no stream of a fake device");
  return *devices;
}

int index_of(c10::Device device) {
  const int index = device.index() < 0 ? std::max(thread_device, 0) : device.index();
  TORCH_CHECK(index < kFakeDevices, "there is no fake device ", index);
  return index;
}

/// The default streams have the id 0, as CUDA's; that of others is their address.
FakeStream& resolve(const c10::Stream& stream) {
  if (stream.id() == 0) return living().default_stream(index_of(stream.device()));
  return *reinterpret_cast<FakeStream*>(stream.id());
}

bool is_default(const FakeStream& stream) {
  return &stream == &living().default_stream(stream.device());
}

c10::Stream stream_of(FakeStream& stream) {
  const c10::Device device(kType, static_cast<c10::DeviceIndex>(stream.device()));
  if (is_default(stream)) return c10::Stream(c10::Stream::DEFAULT, device);
  return c10::Stream(c10::Stream::UNSAFE, device, reinterpret_cast<c10::StreamId>(&stream));
}

/// Threads may ask for it while another records it anew.
struct FakeEvent {
  StreamPoint point;
};

class FakeGuardImpl final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kType; }

  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device previous(kType, static_cast<c10::DeviceIndex>(thread_device));
    setDevice(device);
    return previous;
  }
  c10::Device getDevice() const override {
    return {kType, static_cast<c10::DeviceIndex>(std::max(thread_device, 0))};
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.type() == kType && device.index() < kFakeDevices,
                "no fake device: ", device);
    thread_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    thread_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kFakeDevices; }

  c10::Stream getStream(c10::Device device) const override {
    FakeDevices& devices = living();
    const int index = index_of(device);
    FakeStream* current = this_thread(devices).current[static_cast<size_t>(index)];
    return stream_of(current == nullptr ? devices.default_stream(index) : *current);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(living().default_stream(index_of(device)));
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return stream_of(living().new_stream(index_of(device), priority));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    return getNewStream(device, high_priority ? -1 : 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream previous = getStream(stream.device());
    FakeStream& next = resolve(stream);
    this_thread(living()).current[static_cast<size_t>(next.device())] = &next;
    return previous;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return &resolve(stream); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex /*device*/,
              const c10::EventFlag /*flag*/) const override {
    const auto held = living().lock();
    if (*event == nullptr) *event = new FakeEvent();
    static_cast<FakeEvent*>(*event)->point = resolve(stream).end();
  }
  void block(void* event, const c10::Stream& stream) const override {
    FakeDevices& devices = living();
    FakeStream& waiting = resolve(stream);
    auto held = devices.lock();
    if (devices.drops_wait(waiting)) return;
    const StreamPoint point = static_cast<FakeEvent*>(event)->point;
    if (point.reached() && waiting.end().reached()) return;
    const StreamPoint waited = devices.enqueue(waiting, make_wait(point));
    // In place of the device: what LibTorch does there next is done by this thread, maybe by
    // reading memory without an operation.
    if (is_default(waiting)) devices.wait(held, waited);
  }
  bool queryEvent(void* event) const override {
    thread_local StreamPoint last;
    FakeDevices& devices = living();
    StreamPoint point;
    bool again = false;
    {
      const auto held = devices.lock();
      point = static_cast<FakeEvent*>(event)->point;
      if (point.reached()) return true;
      again = last.stream == point.stream && last.number == point.number;
      if (again) devices.ask_for(point);
    }
    if (again) devices.count(&HostWaits::polls);
    last = point;
    return false;
  }
  void destroyEvent(void* event, const c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<FakeEvent*>(event);
  }

  bool queryStream(const c10::Stream& stream) const override {
    return resolve(stream).end().reached();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    FakeDevices& devices = living();
    devices.count(&HostWaits::streams);
    auto held = devices.lock();
    devices.wait(held, resolve(stream).end());
  }
  void synchronizeEvent(void* event) const override {
    FakeDevices& devices = living();
    devices.count(&HostWaits::events);
    auto held = devices.lock();
    devices.wait(held, static_cast<FakeEvent*>(event)->point);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    FakeDevices& devices = living();
    devices.count(&HostWaits::devices);
    auto held = devices.lock();
    devices.wait_for_device(held, device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    use_on_stream(memory, resolve(stream));
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, FakeGuardImpl);

}  // namespace

int current_device() { return thread_device; }

void set_rank_thread(int device) {
  thread_device = device;
  rank_thread = device >= 0;
}

bool is_rank_thread() { return rank_thread && thread_device >= 0; }

FakeStream* current_stream() {
  FakeDevices* devices = FakeDevices::active();
  if (devices == nullptr || thread_device < 0) return nullptr;
  FakeStream* current = this_thread(*devices).current[static_cast<size_t>(thread_device)];
  return current == nullptr ? &devices->default_stream(thread_device) : current;
}

}  // namespace ppfsdp::nccl::testing
