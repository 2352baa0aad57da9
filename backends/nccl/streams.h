#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <nccl.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backends/nccl/endpoint.h"
#include "backends/nccl/event_pool.h"
#include "src/comm/stream.h"

namespace ppfsdp::nccl {

/// Communication that was asked for and is not issued yet.
class Deferred {
 public:
  virtual ~Deferred() = default;
  /// Issues what there is, if there is any.
  virtual void issue() = 0;
  /// The runtime ends: forgets what is not issued, and gives back what the group holds.
  virtual void end() = 0;
};

/// A stream of the device. Closures run at once on the calling thread, with this as the current
/// stream, so that what LibTorch launches lands here.
///
/// Nothing is bound to a thread: autograd runs backward on a thread of its own while the rank's
/// waits for it. No two threads use one stream at a time.
///
/// Memory. No stream is recorded with the caching allocator (FSDP2's own path has no such record
/// either): when memory comes free would then depend on how far the device is. Instead a
/// communication on a side stream keeps its tensors alive until the compute stream has waited for
/// an event at or behind it, directly or through other streams, or the host has. From then on what
/// the rank does next comes after the communication, so the memory may go to it. So the peak of
/// memory is the same in every step. What is issued on the compute stream keeps nothing. Tensors
/// that a closure uses are the caller's to keep.
class NcclStream final : public comm::Stream, public std::enable_shared_from_this<NcclStream> {
 public:
  /// Made by std::make_shared. `compute`: whether it is the stream of the rank's own operations.
  NcclStream(std::string name, std::shared_ptr<Endpoint> endpoint, c10::Stream stream,
             bool compute);
  /// Waits for what still keeps tensors.
  ~NcclStream() override;

  void run(std::function<void()> closure) override;
  at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) override;
  comm::EventPtr record() override;
  void wait(const comm::EventPtr& event) override;
  void synchronize() override;

  const c10::Stream& stream() const { return stream_; }
  /// As NCCL takes it.
  cudaStream_t native() const { return native_; }
  bool is_compute() const { return compute_; }
  /// An event of the present end, without issuing what is deferred.
  EventPool::Handle mark() const { return endpoint_->events->record(stream_); }

  /// Keeps the tensors of a communication that was just issued here; `second` may be undefined.
  void keep(const at::Tensor& first, const at::Tensor& second);
  /// How many communications keep tensors, for tests.
  size_t kept() const { return kept_.size(); }

  /// `deferred` is issued before this stream is used again.
  void defer(std::shared_ptr<Deferred> deferred);
  void issue_deferred();

 private:
  class Mark;

  struct Kept {
    uint64_t position = 0;
    at::Tensor first, second;
    /// Or: this stream has waited for that position of another.
    std::weak_ptr<NcclStream> other;
    uint64_t other_position = 0;
  };

  /// What uses this stream from now on comes after its first `position` communications.
  void release(uint64_t position);

  const std::shared_ptr<Endpoint> endpoint_;
  const c10::Stream stream_;
  const cudaStream_t native_;
  const bool compute_;
  std::vector<std::shared_ptr<Deferred>> deferred_;
  /// Communications and waits so far.
  uint64_t position_ = 0;
  std::deque<Kept> kept_;
};

/// The stream as this backend's own; an error otherwise.
std::shared_ptr<NcclStream> as_nccl(comm::Stream& stream);

}  // namespace ppfsdp::nccl
