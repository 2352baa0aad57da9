#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

namespace ppfsdp::nccl {

/// Events of one kind of device, kept for reuse: making one costs far more than recording it. Any
/// thread. Made by std::make_shared.
class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  struct Return {
    std::shared_ptr<EventPool> pool;
    void operator()(c10::Event* event) const;
  };
  /// Goes back to its pool when it is destroyed.
  using Handle = std::unique_ptr<c10::Event, Return>;

  explicit EventPool(c10::DeviceType device) : device_(device) {}

  /// An event of the present end of `stream`.
  Handle record(const c10::Stream& stream);

  /// How many were made.
  size_t made() const;

 private:
  const c10::DeviceType device_;
  mutable std::mutex mutex_;
  /// Guarded by mutex_.
  std::vector<std::unique_ptr<c10::Event>> idle_;
  size_t made_ = 0;
};

}  // namespace ppfsdp::nccl
