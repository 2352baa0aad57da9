#pragma once

#include <ATen/core/Tensor.h>

#include <exception>
#include <memory>
#include <vector>

#include "src/comm/runtime.h"
#include "src/comm/stream.h"

namespace ppfsdp::fsdp {

class FSDPParamGroup;
class FSDPState;

/// For destructors: what a stream still uses goes only when its owner has waited for it. When an
/// exception ends the run it may never be done, and what it yields is lost anyway.
template <typename Wait>
void wait_unless_unwinding(const Wait& wait) {
  if (std::uncaught_exceptions() > 0) {
    return;
  }
  try {
    wait();
  } catch (const std::exception&) {
    // Of work that failed; who needs its result has been told, or will be.
    return;
  }
}

/// What the groups below one root share: the side streams, and the orders that prefetching follows.
struct CommContext {
  explicit CommContext(comm::Runtime& runtime)
      : runtime(runtime),
        copy_in(runtime.create_stream("all_gather_copy_in", comm::StreamPriority::kHigh)),
        all_gather(runtime.create_stream("all_gather", comm::StreamPriority::kHigh)),
        reduce_scatter(runtime.create_stream("reduce_scatter", comm::StreamPriority::kHigh)) {}
  ~CommContext() {
    wait_unless_unwinding([this] { finish_reduce(); });
  }
  CommContext(const CommContext&) = delete;
  CommContext& operator=(const CommContext&) = delete;

  /// The all-gather's streams start nothing more before `event`.
  void all_gathers_wait(const comm::EventPtr& event) {
    copy_in->wait(event);
    all_gather->wait(event);
  }

  /// The compute stream waits for the reduce-scatter in flight, after which what it uses of that
  /// stream's memory may be freed. At most one input is alive besides the one being filled.
  void finish_reduce() {
    if (reduce_event != nullptr) {
      runtime.compute_stream().wait(reduce_event);
      reduce_event = nullptr;
      used_by_reduce.clear();
    }
  }

  comm::Runtime& runtime;
  std::shared_ptr<comm::Stream> copy_in;
  std::shared_ptr<comm::Stream> all_gather;
  std::shared_ptr<comm::Stream> reduce_scatter;

  /// The compute stream's memory that the reduce-scatter in flight uses: its input, and the
  /// gradients that it adds to.
  std::vector<at::Tensor> used_by_reduce;
  comm::EventPtr reduce_event;

  /// Groups in the order in which the last complete forward ran them; what forward prefetch
  /// follows.
  std::vector<FSDPParamGroup*> forward_order;
  /// The same for the forward that is running.
  std::vector<FSDPParamGroup*> running_order;
  /// Groups in the order in which forward finished them; backward prefetch goes through it in
  /// reverse.
  std::vector<FSDPParamGroup*> post_forward_order;
  /// The state whose forward is the outermost one running; null outside forward.
  FSDPState* forward_root = nullptr;
};

}  // namespace ppfsdp::fsdp
