#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "src/comm/reduce_op.h"
#include "src/comm/stream.h"

namespace ppfsdp::comm {

/// A collective that failed, timed out or does not match its peers. `what()` is one line that names
/// the operation, the group, its sequence number, this rank and, where known, the rank that
/// differs.
class CommError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Communicator;
using CommunicatorPtr = std::shared_ptr<Communicator>;

/// One rank's end of a group of ranks.
///
/// Operations are queued on the stream that is named and complete in its order: a result may be
/// read on another stream after an event of this one, by the host after Event::synchronize. Ranks
/// must issue the operations of a group in one order. Tensors must be contiguous, on the runtime's
/// device, and are kept alive until the operation is done. Every argument is checked before the
/// backend is called (c10::Error names the operation, the argument, what was got and what would be
/// right); failures of the operation itself are CommError. Roots and peers are ranks in this group.
///
/// Ranks must agree in the operation, dtype, sizes, reduction, root and label: calls that do not
/// are a CommError and move nothing. A label says what is communicated (the name of the module
/// whose parameters are gathered), so that calls for different things, alike in all else, do not
/// pair up. Operations of different groups never do, and need no common order unless ranks block in
/// them.
class Communicator {
 public:
  /// `ranks`: the members as ranks of the world, in group order; `rank`: this rank's index in it;
  /// `device`: where tensors must be.
  Communicator(std::string name, std::vector<int> ranks, int rank,
               c10::Device device = c10::Device(c10::kCPU));
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(ranks_.size()); }
  const std::vector<int>& ranks() const { return ranks_; }
  const std::string& name() const { return name_; }
  c10::Device device() const { return device_; }
  /// How many collectives (all but send and recv) this rank has issued on the group; inside a do_
  /// function, the sequence number of the one being issued.
  uint64_t sequence() const { return sequence_; }

  /// output[r * n, (r+1) * n) = rank r's input, n = input.numel(). `input` may be this rank's slot
  /// of `output` (then it is not copied). output.numel() = size() * n; one dtype, any dtype.
  void all_gather_into(const at::Tensor& output, const at::Tensor& input, Stream& stream,
                       std::string_view label = {});

  /// all_gather_into whose output, 1-D, the backend makes. It is there as any tensor is, but where
  /// its memory lies is only known when the operation is done: take no raw pointer to it before.
  /// (Ranks of one process may share the memory, until one writes there.)
  at::Tensor all_gather(const at::Tensor& input, Stream& stream, std::string_view label = {});

  /// output = this rank's n elements of the elementwise reduction of all inputs, n =
  /// output.numel(); input.numel() = size() * n. Rounded to the dtype after every addition.
  /// `input` may be overwritten; `output` may be this rank's slot of it.
  void reduce_scatter(const at::Tensor& output, const at::Tensor& input, const ReduceOp& op,
                      Stream& stream, std::string_view label = {});

  /// In place; every rank gets the same bits. Reductions take integers (sum, min, max) and
  /// floating-point dtypes; avg and premul-sum (of a finite factor >= 0) floating-point ones only.
  void all_reduce(const at::Tensor& tensor, const ReduceOp& op, Stream& stream,
                  std::string_view label = {});

  /// Every rank's tensor becomes the root's.
  void broadcast(const at::Tensor& tensor, int root, Stream& stream);

  /// A 1-D tensor of `numel` elements without values, for use in this group's operations on
  /// `stream` and subject to what Stream::empty says. A backend that has such memory takes it from
  /// where it copies without staging (NCCL: ncclMemAlloc, registered with the group); the others
  /// from the stream.
  at::Tensor allocate(int64_t numel, at::ScalarType dtype, Stream& stream);

  /// Sends input_splits[r] elements to rank r and receives output_splits[r] from it, each side
  /// concatenated in rank order. Empty splits mean equal parts. The tensors must not overlap.
  void all_to_all(const at::Tensor& output, const at::Tensor& input,
                  c10::ArrayRef<int64_t> output_splits, c10::ArrayRef<int64_t> input_splits,
                  Stream& stream);

  /// Point to point, to another rank; matched in order for each pair of ranks.
  void send(const at::Tensor& tensor, int peer, Stream& stream);
  void recv(const at::Tensor& tensor, int peer, Stream& stream);

  /// Blocks the calling rank until every rank of the group is here.
  void barrier();

  /// The group of those members (ranks in this group, ascending) that pass the same list. Every
  /// member of this group calls it, in the same order, with the list that holds itself.
  CommunicatorPtr subgroup(const std::vector<int>& members, const std::string& name);

 protected:
  /// Inside a do_ function: the label of the call being issued.
  std::string_view label() const { return label_; }

  virtual void do_all_gather_into(const at::Tensor& output, const at::Tensor& input,
                                  Stream& stream) = 0;
  virtual at::Tensor do_all_gather(const at::Tensor& input, Stream& stream);
  virtual at::Tensor do_allocate(int64_t numel, at::ScalarType dtype, Stream& stream);
  virtual void do_reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                 const ReduceOp& op, Stream& stream) = 0;
  virtual void do_all_reduce(const at::Tensor& tensor, const ReduceOp& op, Stream& stream) = 0;
  virtual void do_broadcast(const at::Tensor& tensor, int root, Stream& stream) = 0;
  /// Splits are filled in here.
  virtual void do_all_to_all(const at::Tensor& output, const at::Tensor& input,
                             const std::vector<int64_t>& output_splits,
                             const std::vector<int64_t>& input_splits, Stream& stream) = 0;
  virtual void do_send(const at::Tensor& tensor, int peer, Stream& stream) = 0;
  virtual void do_recv(const at::Tensor& tensor, int peer, Stream& stream) = 0;
  virtual void do_barrier() = 0;
  virtual CommunicatorPtr do_subgroup(const std::vector<int>& members, const std::string& name) = 0;

 private:
  class Checker;
  class Labelled;

  std::string name_;
  std::vector<int> ranks_;
  int rank_;
  c10::Device device_;
  uint64_t sequence_ = 0;
  std::string_view label_;
};

}  // namespace ppfsdp::comm
