#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backends/gloo/group.h"
#include "backends/gloo/operation.h"
#include "backends/gloo/transport.h"
#include "src/comm/call.h"

namespace ppfsdp::gloo {

using comm::Call;

/// Elements [begin, begin + count) of a contiguous tensor, without autograd and for less than
/// narrow costs.
at::Tensor slice(const at::Tensor& whole, int64_t begin, int64_t count);
/// The same of byte scratch memory taken as elements of `dtype`.
at::Tensor slice_as(const at::Tensor& scratch, c10::ScalarType dtype, int64_t begin, int64_t count);

/// An operation that exchanges tensors with other members of a group: every transfer goes straight
/// to its receiver. Before the transfers of a `checked` one are believed, the ranks compare their
/// calls; those messages travel beside the transfers, so that the check costs no further delay.
class Exchange : public Operation {
 public:
  /// `parties`: the ranks of the group that must make the same call, this one among them, in one
  /// order on all of them; of a message, its sender and its receiver. `number`: of the operation
  /// among those of the same parties, for tags and errors.
  Exchange(std::shared_ptr<Group> group, Call call, std::vector<int> parties, uint64_t number,
           bool checked);

  void start() final;
  void await() final;
  bool finish() final;
  void abort() final;

 protected:
  /// Posts the transfers: all receives first, so that a peer's send finds them.
  virtual void post() = 0;
  /// After the transfers. False when it has posted further ones, of the next `phase`.
  virtual bool complete() { return true; }

  /// `peer` is a rank of the group. Tensors of no elements are not sent.
  void send(const at::Tensor& tensor, int peer, uint64_t phase = 0);
  void recv(const at::Tensor& tensor, int peer, uint64_t phase = 0);

  Group& group() const { return *group_; }
  int rank() const { return group_->rank; }
  int size() const { return group_->size(); }
  /// The k-th other rank, counted from this one round the group: ranks that run in step send to
  /// different ones at a time.
  int after(int k) const { return (rank() + k) % size(); }
  int before(int k) const { return (rank() + size() - k) % size(); }
  const Call& call() const { return call_; }

 private:
  struct Pending {
    Transfer transfer;
    int peer;
    bool receives;
  };

  uint32_t tag(const at::Tensor& tensor, int from, int to, uint64_t phase) const;
  void post_check();
  void compare() const;
  void await(const Pending& pending);
  /// One line: what failed, where, and this rank.
  [[noreturn]] void raise(const std::string& what) const;
  [[noreturn]] void raise_transfer_error(int peer, bool receives,
                                         const std::exception& error) const;

  const std::shared_ptr<Group> group_;
  const Call call_;
  const std::vector<int> parties_;
  const uint64_t number_;
  const bool checked_;
  std::atomic<bool> aborted_{false};
  /// Keeps the tags of messages apart from those of collectives.
  const uint64_t channel_;
  const uint64_t label_;
  /// The parties' encoded calls, if checked.
  at::Tensor calls_;
  /// The check's transfers come first.
  c10::SmallVector<Pending, 4> pending_;
  size_t check_transfers_ = 0;
};

}  // namespace ppfsdp::gloo
