#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "src/comm/reduce_op.h"

namespace ppfsdp::sim {

class Operation;
class StreamQueue;
class World;

/// What all members of a group share.
struct Group {
  Group(std::string name, std::vector<int> ranks)
      : name(std::move(name)), ranks(std::move(ranks)) {}

  std::string name;
  /// Members as ranks of the world, in group order.
  std::vector<int> ranks;
  /// Collectives that not all members have issued yet; the first has sequence number `first`.
  std::deque<std::shared_ptr<Operation>> collectives;
  uint64_t first = 0;

  /// Transfers from one member to another: those that one side has issued, the oldest first.
  struct Channel {
    std::deque<std::shared_ptr<Operation>> unmatched;
    uint64_t sends = 0;
    uint64_t receives = 0;
  };
  std::map<std::pair<int, int>, Channel> channels;
};

using GroupPtr = std::shared_ptr<Group>;

/// What one rank asks of an operation. Ranks must agree in all but the tensors.
struct Request {
  enum class Kind {
    kAllGather,
    kReduceScatter,
    kAllReduce,
    kBroadcast,
    kAllToAll,
    kSend,
    kRecv,
    kBarrier,
    kSubgroup,
  };

  Kind kind = Kind::kBarrier;
  at::Tensor output = {};
  at::Tensor input = {};
  comm::ReduceOp op = {};
  /// Broadcast: the root; send and recv: the peer.
  int root = 0;
  std::vector<int64_t> output_splits = {};
  std::vector<int64_t> input_splits = {};
  /// Subgroup: the members as ranks of the group, and the new group's name.
  std::vector<int> members = {};
  std::string name = {};
  /// All-gather: `output` is backed by NaNs that are not to be written, and then by memory that it
  /// shares with other ranks.
  bool shares_output = false;
  /// What the caller says it is for.
  std::string label = {};

  /// "reduce_scatter(Float, 12 elements, avg) for 'layers.0'".
  std::string signature() const;
};

/// One collective, or one transfer between two ranks: made by the first rank that issues it, run
/// when it is at the head of a stream of every participant.
class Operation {
 public:
  /// `members`: the participants as ranks of the group; `label` names it: "all_gather_into #3".
  Operation(World& world, GroupPtr group, std::vector<int> members, std::string label);

  /// Participant `index` joins with `request`, to run on `stream`; a CommError when that does not
  /// match what others asked for.
  void issue(int index, Request request, StreamQueue& stream);
  bool all_issued() const { return issued_ == size(); }
  bool done() const { return done_; }

  /// The operation is at the head of participant `index`'s stream now. Returns whether that was the
  /// last one missing, so that run() may follow.
  bool arrive(int index);
  /// Reads all inputs, writes all outputs, and lets the streams go on.
  void run();

  /// Poisons the outputs of participant `index`, which has arrived; what the operation still has to
  /// read of them is kept aside.
  void poison_outputs(int index);

  /// The group that participant `index` is in after a subgroup operation has run.
  const GroupPtr& new_group(int index) const { return participants_[index].new_group; }

  /// "all_gather_into #3 on group 'world'".
  std::string where() const;
  /// Which participants it waits for, and why, for a report of a deadlock.
  std::string describe_missing() const;

 private:
  struct Participant {
    Request request;
    StreamQueue* stream = nullptr;
    bool arrived = false;
    GroupPtr new_group;
  };

  int size() const { return static_cast<int>(participants_.size()); }
  std::string rank_name(int index) const;
  void check_match(int index, const Request& request) const;
  void make_groups();
  void gather();
  void move_data();

  World& world_;
  GroupPtr group_;
  std::vector<int> members_;
  std::string label_;
  std::vector<Participant> participants_;
  int issued_ = 0;
  int arrived_ = 0;
  bool done_ = false;
};

/// The name of the Communicator's function.
const char* to_string(Request::Kind kind);

}  // namespace ppfsdp::sim
