#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backends/nccl/event_pool.h"
#include "backends/nccl/reporter.h"
#include "backends/nccl/runtime.h"
#include "backends/nccl/work_log.h"

namespace ppfsdp::nccl {

class Handle;
class Deferred;

/// What all groups and streams of one rank share.
class Endpoint : public std::enable_shared_from_this<Endpoint> {
 public:
  explicit Endpoint(Settings given);

  const Settings settings;
  const std::shared_ptr<EventPool> events;
  WorkLog log;

  /// Throws CommError with what failed first on this rank, if something did.
  void check_alive() const;
  bool failed() const { return failed_; }
  std::string failure() const;
  /// Remembers the first failure and wakes the watchdog, which tells the other ranks and aborts
  /// this rank's communicators. Any thread.
  void fail(const std::string& message);
  /// As fail, of an operation for which this rank cannot tell why it went wrong: the message is
  /// "what: why; this is rank 1; " and what the others last reported, or that one of them has
  /// failed. Waits for the store two seconds at most.
  void fail_asking(const What& what, const std::string& why);
  /// fail_asking, and throws.
  [[noreturn]] void raise_asking(const What& what, const std::string& why);
  /// "what: why; this is rank 1": fails with it and throws it. For what every rank knows by itself.
  [[noreturn]] void raise(const What& what, const std::string& why);

  /// Blocks until the event is done, or this rank has failed: then it throws that failure as soon
  /// as the device has stopped.
  void host_wait(const c10::Event& event);
  uint64_t host_waits() const { return host_waits_; }

  /// Blocks until somebody has set the key in the store; false when nobody did in the timeout.
  /// Throws when this rank has failed.
  bool wait_for_key(const std::string& key) const;

  /// Sleeps for `period`, or until this rank has failed or wake() was called.
  void rest(std::chrono::milliseconds period);
  void wake();

  /// Every communicator of this rank, in the order of creation. Throws when this rank has failed:
  /// what is added after that would never be aborted.
  void add(std::shared_ptr<Handle> handle);
  std::vector<std::shared_ptr<Handle>> handles() const;
  /// While one lives, the rank's thread waits for other ranks.
  class Waits {
   public:
    explicit Waits(const Endpoint& endpoint) : endpoint_(endpoint) { ++endpoint_.waiting_; }
    ~Waits() { --endpoint_.waiting_; }
    Waits(const Waits&) = delete;
    Waits& operator=(const Waits&) = delete;

   private:
    const Endpoint& endpoint_;
  };
  /// Whether this rank waits for others, or work of its own does.
  bool waits() const { return waiting_ > 0 || !log.empty(); }

  /// The device has stopped: nothing that this rank has issued runs any more.
  void set_aborted() { aborted_ = true; }

  /// What may hold back communication, of every group.
  void add(std::shared_ptr<Deferred> deferred);
  std::vector<std::shared_ptr<Deferred>> deferred() const;
  /// Keeps what a failed rank's operations may still read and write, until they are aborted.
  void keep_until_end(at::Tensor tensor);
  /// The end: lets go of the groups, which hold this object too, and of what was kept.
  void clear();

  /// Null in a world of one.
  std::shared_ptr<Reporter> reporter;

 private:
  mutable std::mutex mutex_;
  std::condition_variable woken_;
  std::atomic<bool> failed_{false};
  std::atomic<bool> aborted_{false};
  mutable std::atomic<int> waiting_{0};
  std::atomic<uint64_t> host_waits_{0};
  /// Guarded by mutex_.
  std::string failure_;
  bool awake_ = false;
  std::vector<std::shared_ptr<Handle>> handles_;
  std::vector<std::shared_ptr<Deferred>> deferred_;
  bool ended_ = false;
  std::vector<at::Tensor> kept_;
};

}  // namespace ppfsdp::nccl
