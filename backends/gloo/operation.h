#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <thread>

namespace ppfsdp::gloo {

/// One communication operation: transfers that go on in the background between two steps on the
/// rank's own thread.
class Operation {
 public:
  virtual ~Operation() = default;

  /// Starts the transfers; never blocks.
  virtual void start() = 0;
  /// Blocks until the transfers are done; throws CommError. Touches nothing of the rank's but the
  /// transfers, so any thread may call it.
  virtual void await() = 0;
  /// What the host has to do once the transfers are done, such as the fold of a reduction. False
  /// when it has started further transfers, to be awaited and finished in turn.
  virtual bool finish() = 0;
  /// Makes a thread that is in await() return.
  virtual void abort() = 0;

 private:
  friend class Progress;
  friend class SideStream;

  bool started_ = false;
  std::atomic<bool> arrived_{false};
  /// Set before arrived_.
  std::exception_ptr error_;
  std::thread watcher_;
};

using OperationPtr = std::unique_ptr<Operation>;

}  // namespace ppfsdp::gloo
