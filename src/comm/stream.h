#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>
#include <c10/util/ArrayRef.h>

#include <functional>
#include <memory>
#include <string>

namespace ppfsdp::comm {

/// A point in the work of one Stream.
class Event {
 public:
  virtual ~Event() = default;

  /// Blocks the calling rank until all work queued on the stream before the event has run.
  /// Throws the error of that work if it failed.
  virtual void synchronize() = 0;
};

using EventPtr = std::shared_ptr<Event>;

/// An ordered queue of work on a rank's device.
///
/// The compute stream is where a rank's LibTorch operations run; others are made with
/// Runtime::create_stream. On CUDA a stream is a CUDA stream; on Gloo closures run as soon as the
/// work before them is done; on the simulated mesh they run later, in any order that streams and
/// events allow, so that a missing wait shows.
class Stream {
 public:
  explicit Stream(std::string name) : name_(std::move(name)) {}
  virtual ~Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  /// Queues `closure` behind the work already here. It must own (or outlive) all that it touches,
  /// and may issue LibTorch operations but no communication.
  virtual void run(std::function<void()> closure) = 0;

  /// A tensor without values in memory that work queued here may use at once. On CUDA the memory
  /// comes from, and returns to, what the caching allocator keeps for this stream: a tensor made on
  /// another stream may lie where that stream's work still reads and writes. A stream other than
  /// this one that uses the tensor must be waited for here before the last reference to it goes.
  virtual at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options);

  /// Marks the present end of the queue.
  virtual EventPtr record() = 0;

  /// Work queued here from now on starts after `event`; a null event is no wait.
  virtual void wait(const EventPtr& event) = 0;

  /// Blocks the calling rank until the queue is empty; throws the error of work that failed.
  virtual void synchronize() = 0;

  /// For messages and traces.
  const std::string& name() const { return name_; }

 private:
  std::string name_;
};

}  // namespace ppfsdp::comm
