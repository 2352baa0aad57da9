#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "backends/nccl/endpoint.h"
#include "backends/nccl/event_pool.h"
#include "backends/nccl/group.h"
#include "backends/nccl/handle.h"
#include "backends/nccl/streams.h"
#include "backends/nccl/work_log.h"

namespace ppfsdp::nccl {

/// The comparison of what the members of a group ask for in one operation: an all-gather of their
/// calls on the group's own communicator, so that it has the operation's place in the order of
/// everything else there. All members make it, or none does.
class Check {
 public:
  /// Queues it on `stream`. With `lists` the calls are compared with all their lists, else their
  /// records are: those may belong to any operations.
  Check(Endpoint& endpoint, Handle& handle, const What& what, bool lists, NcclStream& stream);

  const c10::Event& done() const { return *done_; }
  /// Once it is done: what differs, if anything does. Any thread.
  std::optional<std::string> find_difference() const;

 private:
  const GroupPtr group_;
  const bool lists_;
  at::Tensor mine_, all_;            // on the device
  at::Tensor host_mine_, host_all_;  // on the host, where the device can reach them
  EventPool::Handle done_;
};

}  // namespace ppfsdp::nccl
