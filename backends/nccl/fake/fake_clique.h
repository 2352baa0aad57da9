#pragma once

#include <nccl.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "backends/nccl/fake/fake_nccl.h"

namespace ppfsdp::nccl::testing {

struct Clique;
struct Launch;

/// How an operator reduces.
struct Reduction {
  ncclRedOp_t kind = ncclSum;  ///< ncclNumOps: the sum of products
  double factor = 1;           ///< of ncclNumOps
};

/// One operation of one rank.
struct Operation {
  NcclCall call;
  Reduction reduction = {};
  ncclComm* comm = nullptr;
  /// Of a collective: how many its communicator had before.
  uint64_t number = 0;
  bool never = false;
  bool done = false;
};

/// What one call, or one group of calls, gives a communicator: done as one.
struct Launch {
  ncclComm* comm = nullptr;
  FakeStream* stream = nullptr;
  /// Other streams on which a group's calls were made: it starts when all have come to it, and they
  /// go on when it is done.
  std::vector<FakeStream*> others = {};
  /// Where those were.
  std::vector<StreamPoint> after = {};
  StreamPoint point = {};
  std::vector<Operation> operations = {};
  bool started = false;
  /// The communicator was aborted.
  bool dropped = false;
};

/// What a split's caller asked for.
struct SplitCall {
  int color = 0;
  int key = 0;
  ncclComm* child = nullptr;
};

/// What the ranks of one communicator share.
struct Clique {
  explicit Clique(int size) : members(static_cast<size_t>(size)) {}

  bool complete() const;
  /// The operation's rank is ready for it: moves the data if it was the last.
  void arrive(Operation& operation);
  /// No operation of the member is there any more.
  void withdraw(const ncclComm* member);

  std::vector<ncclComm*> members;
  /// By number, one operation a rank.
  std::map<uint64_t, std::vector<Operation*>> collectives;
  /// By sender and receiver.
  using Messages = std::map<std::pair<int, int>, std::deque<Operation*>>;
  Messages sends;
  Messages receives;
  /// By number, one call a rank.
  std::map<uint64_t, std::map<int, SplitCall>> splits;
  int finalizing = 0;
};

size_t bytes_of(ncclDataType_t dtype);
std::string name_of(ncclDataType_t dtype);

}  // namespace ppfsdp::nccl::testing

/// One rank's end of a communicator.
struct ncclComm {
  enum class Phase { kInit, kReady, kSplitting, kFinalizing, kFinalized, kDestroyed, kAborted };

  std::shared_ptr<ppfsdp::nccl::testing::Clique> clique;
  int rank = 0;
  int world_rank = 0;
  /// The how-many-th of its rank.
  int ordinal = 0;
  bool blocking = true;
  Phase phase = Phase::kInit;
  /// Never out of this phase.
  bool stuck = false;
  /// For how many more times ncclInProgress is told.
  int polls = 0;
  ncclResult_t error = ncclSuccess;
  std::string text;
  std::vector<ncclComm*> children;
  /// Given, but not yet on their streams.
  std::deque<std::shared_ptr<ppfsdp::nccl::testing::Launch>> held;
  /// On their streams, in order.
  std::deque<std::shared_ptr<ppfsdp::nccl::testing::Launch>> launches;
  uint64_t operations = 0;
  uint64_t collectives = 0;
  uint64_t splits = 0;
  /// Where the child of the split that is under way goes.
  ncclComm** made = nullptr;
  /// Those made; null: destroyed.
  std::vector<std::unique_ptr<ppfsdp::nccl::testing::Reduction>> operators;
  /// By handle.
  std::map<void*, void*> registrations;

  bool gone() const { return phase == Phase::kDestroyed || phase == Phase::kAborted; }
};
