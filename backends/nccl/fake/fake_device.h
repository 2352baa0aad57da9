#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace ppfsdp::nccl::testing {

/// There are devices 0 to kFakeDevices - 1 of type PrivateUse1.
inline constexpr int kFakeDevices = 8;

class FakeStream;

/// The end of the first `number` tasks of a stream; of none, always reached.
struct StreamPoint {
  const FakeStream* stream = nullptr;
  uint64_t number = 0;

  bool reached() const;
};

/// Work in a stream's queue.
class StreamTask {
 public:
  virtual ~StreamTask() = default;
  /// Called, under the devices' lock, when this is the first of its stream and something may have
  /// changed: starts the work if need be, and returns whether it is done.
  virtual bool poll() = 0;
  /// Appends what must be reached before this can be done, as far as known.
  virtual void add_needs(std::vector<StreamPoint>& points) const {}
};

/// A task that is done once the point is reached.
std::unique_ptr<StreamTask> make_wait(StreamPoint point);

/// A queue whose tasks are done in order.
class FakeStream {
 public:
  FakeStream(int device, int priority) : device_(device), priority_(priority) {}

  int device() const { return device_; }
  int priority() const { return priority_; }
  /// What is queued now.
  StreamPoint end() const { return {this, queued_}; }

 private:
  friend class FakeDevices;
  friend struct StreamPoint;

  int device_;
  int priority_;
  std::deque<std::unique_ptr<StreamTask>> tasks_;
  std::atomic<uint64_t> queued_{0};
  std::atomic<uint64_t> done_{0};
};

inline bool StreamPoint::reached() const { return stream == nullptr || stream->done_ >= number; }

struct FakeDeviceOptions {
  /// A stream goes on only when a thread waits for it, directly or through others that wait for it,
  /// or when nothing has happened for `patience`; else as soon as it can.
  bool late = false;
  std::chrono::milliseconds patience{20};
  /// Which of the streams that can go on does so first. With `late`, not 0 also lets streams go on
  /// by chance.
  uint64_t seed = 0;
  /// Not 0: on device 0 the how-many-th wait of a stream for an event does not happen, a fault that
  /// tests of the order must see.
  uint64_t dropped_wait = 0;
};

/// How often the rank's thread of a device blocked for it, or would have on a GPU.
struct HostWaits {
  uint64_t streams = 0;  ///< synchronizeStream
  uint64_t events = 0;   ///< synchronizeEvent
  uint64_t devices = 0;  ///< synchronizeDevice
  uint64_t polls = 0;    ///< queryEvent again and again
  uint64_t scalars = 0;  ///< reads of a tensor's value (item())

  uint64_t total() const { return streams + events + devices + polls + scalars; }
};

/// Stand-ins for GPUs: asynchronous streams, events, and memory that streams order, behind c10's
/// interface to devices of type PrivateUse1. At most one such object lives at a time; without one,
/// the type has no streams. A thread works for the device that it has set (setDevice).
///
/// Tensors lie on the host, where LibTorch's operations run on the calling thread. So that they are
/// ordered as a GPU's kernels are, an operation (but the making of an empty tensor) first blocks
/// until the thread's current stream has done what is queued there; so does a wait of a default
/// stream for an event. None of that counts as a host wait.
///
/// Memory of tensors that such a thread makes belongs to its current stream, as in CUDA's caching
/// allocator: freed, it is kept until that stream, and those that recordDataPtrOnStream has named,
/// have done what was queued then; work of any other stream does not keep it. Fresh and freed
/// memory is filled with bytes ff, in floating point NaN; a write to freed memory is a fault.
class FakeDevices {
 public:
  explicit FakeDevices(const FakeDeviceOptions& options = {});
  /// Work that is still queued is dropped.
  ~FakeDevices();
  FakeDevices(const FakeDevices&) = delete;
  FakeDevices& operator=(const FakeDevices&) = delete;

  HostWaits host_waits(int device) const;
  /// What was done that no program may do.
  std::vector<std::string> faults();

  // For what stands on streams: the guard, the allocator and the fake NCCL.

  /// The one that lives, or null.
  static FakeDevices* active();
  /// Tells this one from earlier ones, of which a thread or a tensor may remember something.
  uint64_t world() const { return world_; }
  std::unique_lock<std::mutex> lock() const { return std::unique_lock(mutex_); }
  FakeStream& default_stream(int device) { return *defaults_[static_cast<size_t>(device)]; }
  FakeStream& new_stream(int device, int priority);
  /// For the calling thread, if it is a rank's.
  void count(uint64_t HostWaits::*kind);
  /// Frees memory of alloc_cpu once the points are reached.
  void free_after(void* memory, size_t bytes, std::vector<StreamPoint> points);

  // With the lock held:

  StreamPoint enqueue(FakeStream& stream, std::unique_ptr<StreamTask> task);
  /// Counts a wait of the stream for an event; whether it is the one to drop.
  bool drops_wait(const FakeStream& stream);
  /// Something that tasks look at has changed.
  void wake();
  void add_fault(std::string fault) { faults_.push_back(std::move(fault)); }
  /// Blocks until the point is reached.
  void wait(std::unique_lock<std::mutex>& lock, StreamPoint point);
  /// Somebody asks for it again and again: as good as a wait.
  void ask_for(StreamPoint point);
  /// What was queued on any stream of the device.
  void wait_for_device(std::unique_lock<std::mutex>& lock, int device);

 private:
  struct Memory {
    void* data;
    size_t bytes;
    std::vector<StreamPoint> after;
  };

  void run();
  /// Does a task of every stream that may go on and adds it to `finished`; whether there was one.
  bool advance(bool all, std::vector<std::unique_ptr<StreamTask>>& finished);
  std::vector<FakeStream*> find_runnable(bool all);
  bool release_memory();
  void free_oldest();

  const FakeDeviceOptions options_;
  const uint64_t world_;
  mutable std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable done_;
  bool woken_ = false;
  bool stopped_ = false;
  /// By device; never changes.
  std::array<FakeStream*, kFakeDevices> defaults_{};
  std::vector<std::unique_ptr<FakeStream>> streams_;
  /// What threads wait for, and what they ask for until it is reached.
  std::deque<StreamPoint> awaited_;
  std::deque<StreamPoint> asked_;
  std::vector<HostWaits> waits_;
  uint64_t event_waits_ = 0;
  std::vector<std::string> faults_;
  /// Freed, but streams may still use it.
  std::deque<Memory> freed_;
  /// Freed and filled; kept for a while to see that nobody writes there.
  std::deque<Memory> kept_;
  size_t kept_bytes_ = 0;
  std::mt19937_64 random_;
  std::thread thread_;
};

/// The device that the calling thread works for, or -1.
int current_device();
/// The calling thread is the one of a rank, and works for this device; -1: no longer. Its waits
/// count, while those of helper threads that set a device do not.
void set_rank_thread(int device);
bool is_rank_thread();
/// Of that device, in the world that lives; null without either.
FakeStream* current_stream();

}  // namespace ppfsdp::nccl::testing
