#pragma once

#include <functional>
#include <string>

#include "src/comm/stream.h"

namespace ppfsdp::comm {

/// A stream that runs its work on the calling thread as soon as it is queued: the host's own
/// program order. Its events are always done, and an error of the work is thrown where it is
/// queued.
class EagerStream : public Stream {
 public:
  using Stream::Stream;

  void run(std::function<void()> closure) override;
  EventPtr record() override;
  /// Blocks the calling thread until the event is done.
  void wait(const EventPtr& event) override;
  void synchronize() override {}
};

}  // namespace ppfsdp::comm
