#include "backends/nccl/streams.h"

#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace ppfsdp::nccl {

/// The end of the first `position` communications of a stream.
class NcclStream::Mark final : public comm::Event {
 public:
  Mark(std::shared_ptr<NcclStream> stream, uint64_t position, EventPool::Handle event)
      : stream(std::move(stream)), position(position), event(std::move(event)) {}

  void synchronize() override {
    stream->endpoint_->host_wait(*event);
    stream->release(position);
  }

  const std::shared_ptr<NcclStream> stream;
  const uint64_t position;
  const EventPool::Handle event;
};

NcclStream::NcclStream(std::string name, std::shared_ptr<Endpoint> endpoint, c10::Stream stream,
                       bool compute)
    : Stream(std::move(name)),
      endpoint_(std::move(endpoint)),
      stream_(stream),
      native_(static_cast<cudaStream_t>(
          c10::impl::VirtualGuardImpl(stream.device_type()).getStreamNativeHandle(stream))),
      compute_(compute) {}

NcclStream::~NcclStream() {
  if (kept_.empty()) return;
  if (std::uncaught_exceptions() == 0 && !endpoint_->failed()) {
    try {
      endpoint_->host_wait(*mark());
      return;
    } catch (const std::exception&) {
      // Every later use of the rank's communication says what went wrong.
    }
  }
  // What was issued goes on until the rank's communicators are aborted.
  for (Kept& kept : kept_) {
    for (at::Tensor* tensor : {&kept.first, &kept.second}) {
      if (tensor->defined()) endpoint_->keep_until_end(std::move(*tensor));
    }
  }
}

void NcclStream::run(std::function<void()> closure) {
  endpoint_->check_alive();
  issue_deferred();
  const c10::StreamGuard guard(stream_);
  closure();
}

at::Tensor NcclStream::empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const c10::StreamGuard guard(stream_);
  return at::empty(sizes, options);
}

comm::EventPtr NcclStream::record() {
  endpoint_->check_alive();
  issue_deferred();
  return std::make_shared<Mark>(shared_from_this(), position_, mark());
}

void NcclStream::wait(const comm::EventPtr& event) {
  endpoint_->check_alive();
  issue_deferred();
  if (event == nullptr) return;
  const auto* mark = dynamic_cast<const Mark*>(event.get());
  TORCH_CHECK(mark != nullptr, "stream '", name(),
              "' of the NCCL backend cannot wait for an event of another backend; record it on a "
              "stream of this runtime");
  if (mark->stream.get() == this) return;
  mark->event->block(stream_);
  if (compute_) {
    mark->stream->release(mark->position);
  } else if (!mark->stream->kept_.empty()) {
    kept_.push_back({++position_, {}, {}, mark->stream, mark->position});
  }
}

void NcclStream::synchronize() {
  endpoint_->check_alive();
  issue_deferred();
  endpoint_->host_wait(*mark());
  release(position_);
}

void NcclStream::keep(const at::Tensor& first, const at::Tensor& second) {
  if (compute_) return;
  kept_.push_back({++position_, first, second, {}, 0});
}

void NcclStream::defer(std::shared_ptr<Deferred> deferred) {
  if (std::find(deferred_.begin(), deferred_.end(), deferred) == deferred_.end()) {
    deferred_.push_back(std::move(deferred));
  }
}

void NcclStream::issue_deferred() {
  while (!deferred_.empty()) {
    const std::shared_ptr<Deferred> first = std::move(deferred_.front());
    deferred_.erase(deferred_.begin());
    first->issue();
  }
}

void NcclStream::release(uint64_t position) {
  while (!kept_.empty() && kept_.front().position <= position) {
    const Kept first = std::move(kept_.front());
    kept_.pop_front();
    if (const auto other = first.other.lock()) other->release(first.other_position);
  }
}

std::shared_ptr<NcclStream> as_nccl(comm::Stream& stream) {
  auto* mine = dynamic_cast<NcclStream*>(&stream);
  TORCH_CHECK(mine != nullptr, "stream '", stream.name(),
              "' is not of the NCCL backend; make it with this runtime's create_stream");
  return mine->shared_from_this();
}

}  // namespace ppfsdp::nccl
