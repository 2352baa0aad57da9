#pragma once

#include <ATen/ThreadLocalState.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "backends/gloo/operation.h"
#include "src/comm/eager_stream.h"
#include "src/comm/stream.h"

namespace ppfsdp::gloo {

class SideStream;

/// Keeps all streams of one rank moving while its thread waits for one of them. Used on the rank's
/// thread only.
///
/// A wait for one operation blocks in that operation's transfers. That is not enough when another
/// stream has communication queued behind transfers that have long arrived: a peer may need it
/// before it serves this wait. Only then each operation under way gets a thread that waits for it,
/// and the rank's thread advances whichever stream can go on. So a rank that waits never holds
/// others up, as on a GPU, and the usual case costs no thread.
class Progress {
 public:
  void add(SideStream* stream) { streams_.push_back(stream); }
  void remove(SideStream* stream);

  /// Starts, runs and finishes whatever can be without blocking.
  void advance_all();

  /// Blocks until `operation`, which is under way, has arrived or some stream could go on.
  void block(Operation& operation);

  /// Starts `operation` and carries it to its end.
  void run(OperationPtr operation);

  /// Runs all streams to their ends.
  void synchronize_all();

  /// Before `operation` is destroyed or finished: ends the thread that watches it, if any.
  static void unwatch(Operation& operation);

 private:
  void watch(Operation& operation);
  bool holds_up_others(const Operation& operation) const;

  std::vector<SideStream*> streams_;
  std::mutex mutex_;
  std::condition_variable arrival_;
  /// Guarded by mutex_: operations that watchers saw arrive, and how many of them were acted upon.
  uint64_t arrived_ = 0;
  uint64_t handled_ = 0;
};

/// Where a communicator puts its operations: every stream of this backend is one.
class OperationQueue {
 public:
  virtual ~OperationQueue() = default;
  virtual void enqueue(OperationPtr operation) = 0;
};

/// The stream of the rank's own LibTorch operations: the host's program order.
class ComputeStream final : public comm::EagerStream, public OperationQueue {
 public:
  ComputeStream(std::string name, std::shared_ptr<Progress> progress)
      : EagerStream(std::move(name)), progress_(std::move(progress)) {}

  void enqueue(OperationPtr operation) override { progress_->run(std::move(operation)); }

 private:
  std::shared_ptr<Progress> progress_;
};

/// An ordered queue that is worked off when somebody waits for it; while nothing in it is pending,
/// what comes is run or started at once. Made by std::make_shared.
class SideStream final : public comm::Stream,
                         public OperationQueue,
                         public std::enable_shared_from_this<SideStream> {
 public:
  SideStream(std::string name, std::shared_ptr<Progress> progress);
  /// Runs what is queued to its end, unless an exception is under way.
  ~SideStream() override;

  void run(std::function<void()> closure) override;
  comm::EventPtr record() override;
  void wait(const comm::EventPtr& event) override;
  void synchronize() override;
  void enqueue(OperationPtr operation) override;

 private:
  friend class Progress;

  /// The end of the first `position` items of a stream.
  class Mark final : public comm::Event {
   public:
    Mark(std::shared_ptr<SideStream> stream, uint64_t position)
        : stream(std::move(stream)), position(position) {}
    void synchronize() override { stream->drain(position); }
    bool done() const { return stream->done_ >= position; }

    const std::shared_ptr<SideStream> stream;
    const uint64_t position;
  };

  /// One of the three.
  struct Item {
    OperationPtr operation;
    std::shared_ptr<Mark> mark;
    std::function<void()> closure;
    /// The closure's, as it was when it was queued (grad mode among others).
    std::optional<at::ThreadLocalState> state;
  };

  uint64_t end() const { return done_ + queue_.size(); }
  /// Works off the head of the queue as far as it goes without blocking; whether an item got done.
  bool advance();
  /// The same for the first item; false when it is pending.
  bool advance_item(Item& item);
  /// Blocks until the first `position` items are done.
  void drain(uint64_t position);
  /// Drops what is queued: it may depend on what failed.
  void fail(std::exception_ptr error);
  void clear();
  void throw_if_failed() const;
  /// What this stream's head waits for: an operation under way, or null when it could go on.
  const Operation* blocker() const;

  std::shared_ptr<Progress> progress_;
  std::deque<Item> queue_;
  /// Items done since the stream was made.
  uint64_t done_ = 0;
  /// Operations in the queue that have not started.
  int64_t unstarted_ = 0;
  bool advancing_ = false;
  std::exception_ptr error_;
};

}  // namespace ppfsdp::gloo
