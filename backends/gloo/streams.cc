#include "backends/gloo/streams.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace ppfsdp::gloo {

void Progress::remove(SideStream* stream) {
  streams_.erase(std::remove(streams_.begin(), streams_.end(), stream), streams_.end());
}

void Progress::advance_all() {
  // Until nothing moves: one stream's progress may be what another waits for.
  for (bool moved = true; moved;) {
    moved = false;
    // By index: a closure may make a stream.
    for (size_t i = 0; i < streams_.size(); ++i) moved |= streams_[i]->advance();
  }
}

bool Progress::holds_up_others(const Operation& operation) const {
  return std::any_of(streams_.begin(), streams_.end(), [&](const SideStream* stream) {
    return stream->unstarted_ > 0 && stream->blocker() != &operation;
  });
}

void Progress::watch(Operation& operation) {
  if (operation.arrived_ || operation.watcher_.joinable()) return;
  operation.watcher_ = std::thread([this, &operation] {
    try {
      operation.await();
    } catch (...) {
      operation.error_ = std::current_exception();
    }
    const std::lock_guard lock(mutex_);
    operation.arrived_ = true;
    ++arrived_;
    arrival_.notify_all();
  });
}

void Progress::unwatch(Operation& operation) {
  if (!operation.watcher_.joinable()) return;
  if (!operation.arrived_) operation.abort();
  operation.watcher_.join();
}

void Progress::block(Operation& operation) {
  if (operation.arrived_) return;
  if (!operation.watcher_.joinable()) {
    const auto queued = [](const SideStream* stream) { return stream->unstarted_ > 0; };
    if (std::any_of(streams_.begin(), streams_.end(), queued)) advance_all();
    if (!holds_up_others(operation)) {
      try {
        operation.await();
      } catch (...) {
        operation.error_ = std::current_exception();
      }
      operation.arrived_ = true;
      return;
    }
    watch(operation);
  }
  for (SideStream* stream : streams_) {
    if (!stream->queue_.empty() && stream->queue_.front().operation != nullptr) {
      watch(*stream->queue_.front().operation);
    }
  }
  {
    std::unique_lock lock(mutex_);
    arrival_.wait(lock, [&] { return arrived_ != handled_; });
    handled_ = arrived_;
  }
  // This may finish, and destroy, `operation`.
  advance_all();
}

void Progress::run(OperationPtr operation) {
  struct Unwatch {
    Operation& operation;
    ~Unwatch() { unwatch(operation); }
  } guard{*operation};
  operation->started_ = true;
  operation->start();
  do {
    operation->arrived_ = false;
    while (!operation->arrived_) block(*operation);
    unwatch(*operation);
    if (operation->error_) std::rethrow_exception(operation->error_);
  } while (!operation->finish());
  advance_all();
}

void Progress::synchronize_all() {
  for (size_t i = 0; i < streams_.size(); ++i) streams_[i]->synchronize();
}

SideStream::SideStream(std::string name, std::shared_ptr<Progress> progress)
    : Stream(std::move(name)), progress_(std::move(progress)) {
  progress_->add(this);
}

SideStream::~SideStream() {
  if (std::uncaught_exceptions() == 0 && !queue_.empty()) {
    try {
      drain(end());
    } catch (const std::exception& error) {
      TORCH_WARN("stream '", name(), "' was destroyed with work that failed: ", error.what());
    }
  }
  progress_->remove(this);
  clear();
}

void SideStream::run(std::function<void()> closure) {
  throw_if_failed();
  advance();
  if (queue_.empty()) return closure();
  queue_.push_back({nullptr, nullptr, std::move(closure), at::ThreadLocalState()});
}

comm::EventPtr SideStream::record() {
  advance();
  // Every mark behind which nothing is pending is alike; a failed stream's event must throw.
  static const comm::EventPtr done = comm::EagerStream("done").record();
  if (queue_.empty() && !error_) return done;
  return std::make_shared<Mark>(shared_from_this(), end() + (error_ ? 1 : 0));
}

void SideStream::wait(const comm::EventPtr& event) {
  throw_if_failed();
  if (event == nullptr) return;
  auto mark = std::dynamic_pointer_cast<Mark>(event);
  // Another kind of event is the compute stream's, which is done, or blocks the host.
  if (mark == nullptr) return event->synchronize();
  if (mark->stream.get() == this || mark->done()) return;
  queue_.push_back({nullptr, std::move(mark), nullptr, std::nullopt});
}

void SideStream::synchronize() {
  drain(end());
  throw_if_failed();
}

void SideStream::enqueue(OperationPtr operation) {
  throw_if_failed();
  queue_.push_back({std::move(operation), nullptr, nullptr, std::nullopt});
  ++unstarted_;
  advance();
}

bool SideStream::advance() {
  if (advancing_ || queue_.empty()) return false;
  const uint64_t before = done_;
  advancing_ = true;
  try {
    while (!queue_.empty() && advance_item(queue_.front())) {
      queue_.pop_front();
      ++done_;
    }
  } catch (...) {
    fail(std::current_exception());
  }
  advancing_ = false;
  return done_ != before;
}

bool SideStream::advance_item(Item& item) {
  if (item.mark != nullptr) return item.mark->done();
  if (item.operation == nullptr) {
    const at::ThreadLocalStateGuard guard(*item.state);
    item.closure();
    return true;
  }
  Operation& operation = *item.operation;
  if (!operation.started_) {
    operation.started_ = true;
    --unstarted_;
    operation.start();
  }
  if (!operation.arrived_) return false;
  Progress::unwatch(operation);
  if (operation.error_) std::rethrow_exception(operation.error_);
  if (operation.finish()) return true;
  operation.arrived_ = false;
  return false;
}

void SideStream::drain(uint64_t position) {
  TORCH_CHECK(!advancing_, "stream '", name(), "': a closure must not wait for its own stream");
  for (;;) {
    advance();
    if (done_ >= position) break;
    throw_if_failed();
    Item& head = queue_.front();
    if (head.mark != nullptr) {
      // A copy: the item goes as soon as its event is done.
      const std::shared_ptr<Mark> mark = head.mark;
      try {
        mark->synchronize();
      } catch (...) {
        fail(std::current_exception());
        throw;
      }
    } else {
      progress_->block(*head.operation);
    }
  }
  // What waited for this stream may go on.
  progress_->advance_all();
}

void SideStream::fail(std::exception_ptr error) {
  error_ = std::move(error);
  clear();
}

void SideStream::clear() {
  for (Item& item : queue_) {
    if (item.operation != nullptr) Progress::unwatch(*item.operation);
  }
  queue_.clear();
  unstarted_ = 0;
}

void SideStream::throw_if_failed() const {
  if (error_) std::rethrow_exception(error_);
}

const Operation* SideStream::blocker() const {
  const SideStream* stream = this;
  while (!stream->queue_.empty()) {
    const Item& head = stream->queue_.front();
    if (head.mark == nullptr) return head.operation.get();
    if (head.mark->done()) return nullptr;
    stream = head.mark->stream.get();
  }
  return nullptr;
}

}  // namespace ppfsdp::gloo
