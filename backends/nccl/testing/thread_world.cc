#include "backends/nccl/testing/thread_world.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>

#include "src/comm/communicator.h"

namespace ppfsdp::nccl::testing {
namespace {

constexpr std::chrono::seconds kDeadline{60};

/// A copy as CUDA queues it.
class CopyTask final : public StreamTask {
 public:
  CopyTask(at::Tensor to, at::Tensor from)
      : to_(std::move(to)),
        from_(std::move(from)),
        to_data_(to_.mutable_data_ptr()),
        from_data_(from_.const_data_ptr()),
        bytes_(from_.nbytes()) {}

  bool poll() override {
    if (bytes_ > 0) std::memcpy(to_data_, from_data_, bytes_);
    return true;
  }

 private:
  // The host's end is memory that CUDA keeps until the copy is done; the device's is kept too.
  const at::Tensor to_, from_;
  void* const to_data_;
  const void* const from_data_;
  const size_t bytes_;
};

void copy_later(const at::Tensor& to, const at::Tensor& from, c10::Stream stream) {
  TORCH_CHECK(to.nbytes() == from.nbytes() && to.is_contiguous() && from.is_contiguous(),
              "the fake copies contiguous tensors of one size");
  FakeDevices& devices = *FakeDevices::active();
  auto task = std::make_unique<CopyTask>(to, from);
  const auto held = devices.lock();
  devices.enqueue(*static_cast<FakeStream*>(stream.native_handle()), std::move(task));
}

}  // namespace

ThreadWorld::ThreadWorld(int size, const ThreadWorldOptions& options)
    : size_(size),
      settings_(options.settings),
      devices_(options.devices),
      nccl_(devices_, options.polls) {
  const auto shared = c10::make_intrusive<c10d::HashStore>();
  for (int rank = 0; rank < size; ++rank) {
    stores_.push_back(c10::make_intrusive<RankStore>(shared));
  }
}

std::vector<std::string> ThreadWorld::run(const std::function<void(NcclRuntime& runtime)>& fn) {
  std::vector<std::string> errors(static_cast<size_t>(size_));
  std::exception_ptr first;
  std::mutex mutex;
  std::condition_variable changed;
  int ended = 0, finished = 0;

  const auto run_rank = [&](int rank) {
    set_rank_thread(rank);
    Settings mine = settings_;
    mine.rank = rank;
    mine.world_size = size_;
    mine.store = stores_[static_cast<size_t>(rank)];
    mine.tensors = c10::Device(c10::kCPU);
    mine.streams = c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(rank));
    mine.hooks.copy = copy_later;
    mine.shares_process = true;
    try {
      // Destroyed as a rank's is when an exception leaves it.
      const std::unique_ptr<NcclRuntime> runtime = make_runtime(std::move(mine));
      try {
        fn(*runtime);
      } catch (const ProcessEnds&) {
        store(rank).cut();
        nccl_.stop_rank(rank);
        std::unique_lock lock(mutex);
        ++ended;
        changed.notify_all();
        changed.wait(lock, [&] { return finished + ended >= size_; });
        throw;
      }
    } catch (const ProcessEnds&) {
    } catch (const comm::CommError& error) {
      errors[static_cast<size_t>(rank)] = error.what();
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!first) first = std::current_exception();
    }
    set_rank_thread(-1);
    const std::lock_guard lock(mutex);
    ++finished;
    changed.notify_all();
  };

  std::vector<std::thread> threads;
  for (int rank = 0; rank < size_; ++rank) threads.emplace_back(run_rank, rank);
  {
    std::unique_lock lock(mutex);
    if (!changed.wait_for(lock, kDeadline, [&] { return finished == size_; })) {
      fmt::print(stderr, "{} of {} ranks hang\n", size_ - finished, size_);
      std::abort();
    }
  }
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
  return errors;
}

std::vector<std::string> ThreadWorld::find_faults() {
  std::vector<std::string> faults = devices_.faults();
  for (std::string& misuse : nccl_.misuses()) faults.push_back(std::move(misuse));
  const auto [comms, buffers, registrations, operators] = nccl_.living();
  if (comms + buffers + registrations + operators > 0) {
    faults.push_back(fmt::format(
        "left over: {} communicators, {} buffers, {} registrations, {} reduction operators", comms,
        buffers, registrations, operators));
  }
  return faults;
}

void run_threads(int n, const ThreadWorldOptions& options,
                 const std::function<void(NcclRuntime& runtime)>& fn) {
  ThreadWorld world(n, options);
  for (const std::string& error : world.run(fn)) {
    if (!error.empty()) throw comm::CommError(error);
  }
  const std::vector<std::string> faults = world.find_faults();
  TORCH_CHECK(faults.empty(), "the world has faults: ", faults);
}

}  // namespace ppfsdp::nccl::testing
