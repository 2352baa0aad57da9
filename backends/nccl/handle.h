#pragma once

#include <c10/util/FunctionRef.h>
#include <nccl.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backends/nccl/endpoint.h"
#include "backends/nccl/group.h"
#include "backends/nccl/work_log.h"

namespace ppfsdp::nccl {

/// One ncclComm_t, non-blocking: NCCL's functions return at once, perhaps with ncclInProgress, and
/// this class asks until they are through, for no longer than the timeout.
///
/// The rank's thread uses the communicator and the watchdog asks it for errors and aborts it, so a
/// mutex is held during each single call of NCCL, never while waiting. Because the calls return at
/// once it is never held for long; should the rank's thread be stuck inside one nevertheless (the
/// driver blocks a launch when its queue is full), abort() goes ahead without the mutex after a
/// second: the first thing that ncclCommAbort does is to raise the flag that ends whatever is under
/// way, and the alternative would be to hang for ever.
class Handle {
 public:
  Handle(std::shared_ptr<Endpoint> endpoint, GroupPtr group)
      : endpoint_(std::move(endpoint)), group_(std::move(group)) {}
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  const Group& group() const { return *group_; }

  /// The communicator of the world. Rank 0 makes the unique id, which goes through the store.
  static std::shared_ptr<Handle> join_world(const std::shared_ptr<Endpoint>& endpoint,
                                            GroupPtr group);
  /// That of a part of this one; a call that all members make. `color` is equal on those that come
  /// together, and their order is that of their ranks here.
  std::shared_ptr<Handle> split(GroupPtr group, int color, const What& what);

  /// Lets `work` call NCCL and returns when NCCL has taken it all. An error is CommError, and ends
  /// this rank's communication; `what` is what it names.
  void call(c10::function_ref<ncclResult_t(ncclComm_t)> work, const What& what);
  /// The same, but an error of NCCL that does not end the communication is returned.
  ncclResult_t try_call(c10::function_ref<ncclResult_t(ncclComm_t)> work);

  /// What has gone wrong in the background, as text; empty when nothing has, or when the rank's own
  /// thread is in a call and will see it. For the watchdog.
  std::string find_error();

  /// Ends all these communicators at once, whatever they are doing, and frees them. They are
  /// aborted as one group of NCCL: freeing one waits for the device, on which another's kernels may
  /// run that only their own abort ends.
  static void abort(const std::vector<std::shared_ptr<Handle>>& handles);

  /// Lets all that was issued on these communicators end on all ranks, and frees them. Those that
  /// are not done by the deadline are aborted. Every rank calls it with its communicators.
  static void finalize(const std::vector<std::shared_ptr<Handle>>& handles,
                       std::chrono::steady_clock::time_point deadline);

 private:
  /// Asks until nothing is in progress; ncclInProgress when the timeout is over.
  ncclResult_t settle();
  /// The mutex; throws instead of waiting for it when this rank has failed.
  std::unique_lock<std::mutex> acquire();
  /// Throws when there is no communicator any more. mutex_ is held.
  void check_open() const;
  std::string error_text(ncclResult_t result);

  const std::shared_ptr<Endpoint> endpoint_;
  const GroupPtr group_;
  std::mutex mutex_;
  /// Guarded by mutex_, as is every use of what it points to.
  ncclComm_t comm_ = nullptr;
  bool closed_ = false;
  /// While a split is under way: where NCCL puts the communicator when it pleases, which nobody may
  /// look at before the communicator that is split has settled or was aborted.
  ncclComm_t made_ = nullptr;
};

}  // namespace ppfsdp::nccl
