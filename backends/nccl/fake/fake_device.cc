#include "backends/nccl/fake/fake_device.h"

#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "backends/nccl/fake/fake_memory.h"

namespace ppfsdp::nccl::testing {
namespace {

std::atomic<FakeDevices*> active_devices{nullptr};
std::atomic<uint64_t> worlds{0};

/// Freed memory that is looked after.
constexpr size_t kMostKept = size_t{4} << 20;

class WaitTask final : public StreamTask {
 public:
  explicit WaitTask(StreamPoint point) : point_(point) {}
  bool poll() override { return point_.reached(); }
  void add_needs(std::vector<StreamPoint>& points) const override { points.push_back(point_); }

 private:
  StreamPoint point_;
};

}  // namespace

std::unique_ptr<StreamTask> make_wait(StreamPoint point) {
  return std::make_unique<WaitTask>(point);
}

FakeDevices::FakeDevices(const FakeDeviceOptions& options)
    : options_(options), world_(++worlds), waits_(kFakeDevices), random_(options.seed) {
  for (int device = 0; device < kFakeDevices; ++device) {
    streams_.push_back(std::make_unique<FakeStream>(device, 0));
    defaults_[static_cast<size_t>(device)] = streams_.back().get();
  }
  own_tensor_memory();
  observe_operations(true);
  FakeDevices* none = nullptr;
  TORCH_CHECK(active_devices.compare_exchange_strong(none, this),
              "only one FakeDevices may live at a time");
  thread_ = std::thread([this] { run(); });
}

FakeDevices::~FakeDevices() {
  {
    const auto held = lock();
    stopped_ = true;
  }
  work_.notify_all();
  done_.notify_all();
  thread_.join();
  active_devices = nullptr;
  observe_operations(false);
  for (Memory& memory : freed_) c10::free_cpu(memory.data);
  while (!kept_.empty()) free_oldest();
}

FakeDevices* FakeDevices::active() { return active_devices; }

HostWaits FakeDevices::host_waits(int device) const {
  const auto held = lock();
  return waits_[static_cast<size_t>(device)];
}

std::vector<std::string> FakeDevices::faults() {
  const auto held = lock();
  while (!kept_.empty()) free_oldest();
  return faults_;
}

FakeStream& FakeDevices::new_stream(int device, int priority) {
  const auto held = lock();
  streams_.push_back(std::make_unique<FakeStream>(device, priority));
  return *streams_.back();
}

void FakeDevices::count(uint64_t HostWaits::*kind) {
  if (!is_rank_thread()) return;
  const auto held = lock();
  ++(waits_[static_cast<size_t>(current_device())].*kind);
}

StreamPoint FakeDevices::enqueue(FakeStream& stream, std::unique_ptr<StreamTask> task) {
  stream.tasks_.push_back(std::move(task));
  ++stream.queued_;
  wake();
  return stream.end();
}

bool FakeDevices::drops_wait(const FakeStream& stream) {
  return stream.device() == 0 && ++event_waits_ == options_.dropped_wait;
}

void FakeDevices::wake() {
  woken_ = true;
  work_.notify_all();
}

void FakeDevices::wait(std::unique_lock<std::mutex>& lock, StreamPoint point) {
  if (point.reached()) return;
  awaited_.push_back(point);
  wake();
  done_.wait(lock, [&] { return point.reached() || stopped_; });
  awaited_.erase(std::find_if(awaited_.begin(), awaited_.end(), [&](const StreamPoint& other) {
    return other.stream == point.stream && other.number == point.number;
  }));
}

void FakeDevices::ask_for(StreamPoint point) {
  if (!options_.late) return;
  asked_.push_back(point);
  wake();
}

void FakeDevices::wait_for_device(std::unique_lock<std::mutex>& lock, int device) {
  std::vector<StreamPoint> points;
  for (const auto& stream : streams_) {
    if (stream->device() == device) points.push_back(stream->end());
  }
  for (const StreamPoint& point : points) wait(lock, point);
}

void FakeDevices::run() {
  auto held = lock();
  bool all = !options_.late;
  while (!stopped_) {
    woken_ = false;
    // What tasks hold is freed without the lock, which freeing memory takes.
    std::vector<std::unique_ptr<StreamTask>> finished;
    const bool moved = advance(all, finished);
    if (!finished.empty()) {
      done_.notify_all();
      held.unlock();
      finished.clear();
      held.lock();
    }
    if (release_memory() || moved || woken_) {
      all = !options_.late;
      done_.notify_all();
      continue;
    }
    const auto changed = [&] { return woken_ || stopped_; };
    const bool queued = std::any_of(
        streams_.begin(), streams_.end(),
        [](const std::unique_ptr<FakeStream>& stream) { return !stream->end().reached(); });
    if (options_.late && queued) {
      all = !work_.wait_for(held, options_.patience, changed);
    } else {
      work_.wait(held, changed);
    }
  }
}

bool FakeDevices::advance(bool all, std::vector<std::unique_ptr<StreamTask>>& finished) {
  bool moved = false;
  for (FakeStream* stream : find_runnable(all)) {
    if (stream->tasks_.empty() || !stream->tasks_.front()->poll()) continue;
    finished.push_back(std::move(stream->tasks_.front()));
    stream->tasks_.pop_front();
    ++stream->done_;
    moved = true;
    // Out of patience: no more than what gets things going.
    if (options_.late && all) break;
  }
  return moved;
}

std::vector<FakeStream*> FakeDevices::find_runnable(bool all) {
  std::vector<FakeStream*> runnable;
  if (all) {
    for (const auto& stream : streams_) {
      if (!stream->tasks_.empty()) runnable.push_back(stream.get());
    }
  } else {
    std::vector<StreamPoint> needs(awaited_.begin(), awaited_.end());
    std::erase_if(asked_, [](const StreamPoint& point) { return point.reached(); });
    needs.insert(needs.end(), asked_.begin(), asked_.end());
    const auto visit = [&](FakeStream* stream) {
      if (stream->tasks_.empty() ||
          std::find(runnable.begin(), runnable.end(), stream) != runnable.end()) {
        return;
      }
      runnable.push_back(stream);
      stream->tasks_.front()->add_needs(needs);
    };
    if (options_.seed != 0) {
      for (const auto& stream : streams_) {
        if (random_() % 8 == 0) visit(stream.get());
      }
    }
    for (size_t i = 0; i < needs.size(); ++i) {
      if (needs[i].reached()) continue;
      visit(const_cast<FakeStream*>(needs[i].stream));
    }
  }
  std::shuffle(runnable.begin(), runnable.end(), random_);
  return runnable;
}

void FakeDevices::free_after(void* memory, size_t bytes, std::vector<StreamPoint> points) {
  const auto held = lock();
  freed_.push_back({memory, bytes, std::move(points)});
  if (!release_memory()) wake();
}

bool FakeDevices::release_memory() {
  bool released = false;
  for (auto memory = freed_.begin(); memory != freed_.end();) {
    if (!std::all_of(memory->after.begin(), memory->after.end(),
                     [](const StreamPoint& point) { return point.reached(); })) {
      ++memory;
      continue;
    }
    std::memset(memory->data, 0xff, memory->bytes);
    kept_bytes_ += memory->bytes;
    kept_.push_back(std::move(*memory));
    memory = freed_.erase(memory);
    released = true;
  }
  while (kept_bytes_ > kMostKept) free_oldest();
  return released;
}

void FakeDevices::free_oldest() {
  const Memory& memory = kept_.front();
  const auto* bytes = static_cast<const unsigned char*>(memory.data);
  if (!std::all_of(bytes, bytes + memory.bytes, [](unsigned char byte) { return byte == 0xff; })) {
    add_fault("memory of " + std::to_string(memory.bytes) +
              " bytes was written after it was freed");
  }
  kept_bytes_ -= memory.bytes;
  c10::free_cpu(memory.data);
  kept_.pop_front();
}

}  // namespace ppfsdp::nccl::testing
