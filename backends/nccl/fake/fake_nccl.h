#pragma once

#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <ostream>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "backends/nccl/fake/fake_device.h"

namespace ppfsdp::nccl::testing {

/// One call of an nccl function, as it was made.
struct NcclCall {
  int rank = -1;              ///< the device of the calling thread, of a communicator its maker's
  std::string function = {};  ///< without "nccl": "AllGather"
  int comm = -1;              ///< the how-many-th communicator of the rank, from 0; -1: none
  size_t count = 0;           ///< elements; of memory bytes; of a new communicator its size
  ncclDataType_t dtype = ncclInt8;
  int peer = -1;            ///< root or peer; the rank in a new communicator, the color of a split
  std::string detail = {};  ///< "sum", "avg", "premul(0.25)"; of a new communicator its config
  const void* send = nullptr;
  const void* receive = nullptr;
  const FakeStream* stream = nullptr;
  /// 0: in no group; else the how-many-th of the calling thread.
  uint64_t group = 0;
  /// How many operations the communicator was given before, of a communicator how many the rank
  /// had.
  uint64_t nth = 0;
};

/// "AllReduce(comm 0, 12 float32, sum)", with only what the function has.
std::string to_string(const NcclCall& call);
std::ostream& operator<<(std::ostream& out, const NcclCall& call);

/// What goes wrong with a call.
struct NcclFault {
  enum class Kind {
    kFails,       ///< it returns `result`
    kFailsLater,  ///< it returns as ever; then the communicator's asynchronous error is `result`
    kNeverDone,   ///< of an operation: stays on its stream; else ncclInProgress for ever
    kBlocks,      ///< does not return until the communicator is aborted
    kInProgress,  ///< ncclInProgress, also from the next `polls` of ncclCommGetAsyncError
  };

  Kind kind = Kind::kFails;
  ncclResult_t result = ncclSystemError;
  /// For ncclGetLastError.
  std::string text = {};
  int polls = 0;
};

/// An NCCL for ranks that are threads of this process, each with a fake device: the nccl functions,
/// which this library defines, belong to the FakeNccl that lives (one at a time).
///
/// Data really moves, on the devices' streams. As in NCCL:
/// - An operation is done when all ranks of the communicator have come to it, in the order in which
///   each was given it; a message when both its ends have. The operations of a communicator, or
///   those of one group, are done one after the other even when they are on different streams.
/// - Operations that do not match (function, count, dtype, reduction, root) are never done.
/// - Reductions fold as comm::ReductionOrder::kNcclRing; ncclAvg multiplies each value by 1 / n,
///   rounded to the dtype, and rounds to the dtype, before the sum. No other dtypes than NCCL's.
/// - Collectives of no elements do nothing.
/// - Of a communicator that is not `blocking`, calls return ncclInProgress, and their work is on
///   its stream only once ncclCommGetAsyncError says so; a split's result is there only then.
/// - Aborted, a communicator leaves its streams; the other ranks' operations stay.
class FakeNccl {
 public:
  using Where = std::function<bool(const NcclCall&)>;

  /// `polls`: for how many calls of ncclCommGetAsyncError anything is in progress for a
  /// communicator that does not block.
  explicit FakeNccl(FakeDevices& devices, int polls = 1);
  ~FakeNccl();
  FakeNccl(const FakeNccl&) = delete;
  FakeNccl& operator=(const FakeNccl&) = delete;

  /// From now on `fault` befalls calls of which `where` holds; the first that does counts.
  void inject(Where where, NcclFault fault);
  /// As if the rank's process had ended: nothing of what it has given comes to pass any more.
  void stop_rank(int rank);
  /// From now on a rank that aborts is a ncclRemoteError to those that have work with it.
  void tell_of_aborts();

  /// From now on no call blocks: those that do return ncclInternalError.
  void release();

  /// The calls of a rank so far, without those of ncclCommGetAsyncError and those that only ask.
  std::vector<NcclCall> calls(int rank) const;
  /// Forgets the calls so far.
  void clear_calls();
  /// What was done that NCCL does not allow: use after destruction, of a communicator while
  /// something is in progress, memory freed while registered, a parent destroyed before its child.
  std::vector<std::string> misuses() const;

  /// What is there now.
  struct Living {
    int comms = 0;
    int buffers = 0;
    int registrations = 0;
    int operators = 0;

    bool operator==(const Living&) const = default;
  };
  Living living() const;

  struct State;

 private:
  std::unique_ptr<State> state_;
};

}  // namespace ppfsdp::nccl::testing
