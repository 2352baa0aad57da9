#include "backends/nccl/event_pool.h"

#include <utility>

namespace ppfsdp::nccl {

void EventPool::Return::operator()(c10::Event* event) const {
  std::unique_ptr<c10::Event> owned(event);
  const std::lock_guard lock(pool->mutex_);
  pool->idle_.push_back(std::move(owned));
}

EventPool::Handle EventPool::record(const c10::Stream& stream) {
  std::unique_ptr<c10::Event> event;
  {
    const std::lock_guard lock(mutex_);
    if (idle_.empty()) {
      ++made_;
    } else {
      event = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  if (event == nullptr) event = std::make_unique<c10::Event>(device_);
  event->record(stream);
  return Handle(event.release(), Return{shared_from_this()});
}

size_t EventPool::made() const {
  const std::lock_guard lock(mutex_);
  return made_;
}

}  // namespace ppfsdp::nccl
