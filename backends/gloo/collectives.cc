#include "backends/gloo/collectives.h"

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>

#include "src/comm/reduction.h"

namespace ppfsdp::gloo {
namespace {

constexpr comm::ReductionOrder kOrder = comm::ReductionOrder::kGlooRing;

/// Up to this size an all_reduce among more than two ranks sends the whole tensor to every rank. It
/// saves a round trip (50 us and more) and costs (n - 1) - 2 (n - 1) / n times the transfer and the
/// fold, some 1 GB/s: equal at about 40 KB for 4 ranks, 12 KB for 8.
constexpr int64_t kWholeBytes = 32 << 10;

std::vector<int> everybody(const Group& group) {
  std::vector<int> ranks(group.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

Call with_label(Call call, std::string label) {
  call.label = std::move(label);
  return call;
}

class Collective : public Exchange {
 public:
  Collective(Place place, Call call)
      : Exchange(place.group, with_label(std::move(call), std::move(place.label)),
                 everybody(*place.group), place.number, place.checked) {}

 protected:
  /// One slice of `count` elements for each other rank, in the order of before(1), before(2), ...
  at::Tensor take_scratch(c10::ScalarType dtype, int64_t count) {
    return group().endpoint->scratch.take((size() - 1) * count *
                                          static_cast<int64_t>(c10::elementSize(dtype)));
  }

  /// Receives a slice of `scratch` from every other rank.
  void recv_slices(const at::Tensor& scratch, c10::ScalarType dtype, int64_t count,
                   uint64_t phase) {
    for (int k = 1; k < size(); ++k) {
      recv(slice_as(scratch, dtype, (k - 1) * count, count), before(k), phase);
    }
  }

  /// Folds the slices of `scratch` with `own`, this rank's, into `output`: elements from `begin` on
  /// of a reduction of `total`.
  void fold(const comm::ReduceOp& op, const at::Tensor& own, at::Tensor scratch, int64_t total,
            int64_t begin, const at::Tensor& output) {
    const int64_t count = own.numel();
    c10::SmallVector<at::Tensor, 8> slices(size());
    slices[rank()] = own;
    for (int k = 1; k < size(); ++k) {
      slices[before(k)] = slice_as(scratch, own.scalar_type(), (k - 1) * count, count);
    }
    comm::reduce_slices(kOrder, op, slices, total, begin, output);
    group().endpoint->scratch.give_back(std::move(scratch));
  }
};

void copy(const at::Tensor& to, const at::Tensor& from) {
  void* destination = to.mutable_data_ptr();
  const void* source = from.const_data_ptr();
  if (destination != source && from.numel() > 0) std::memcpy(destination, source, from.nbytes());
}

class AllGather final : public Collective {
 public:
  AllGather(Place place, const at::Tensor& output, const at::Tensor& input)
      : Collective(std::move(place), {.kind = Call::Kind::kAllGatherInto,
                                      .dtype = output.scalar_type(),
                                      .count = output.numel()}),
        output_(output),
        input_(input) {}

 protected:
  void post() override {
    const int64_t count = input_.numel();
    for (int k = 1; k < size(); ++k) {
      recv(slice(output_, before(k) * count, count), before(k));
    }
    for (int k = 1; k < size(); ++k) send(input_, after(k));
    copy(slice(output_, rank() * count, count), input_);
  }

 private:
  const at::Tensor output_;
  const at::Tensor input_;
};

class ReduceScatter final : public Collective {
 public:
  ReduceScatter(Place place, const at::Tensor& output, const at::Tensor& input,
                const comm::ReduceOp& op)
      : Collective(std::move(place), {.kind = Call::Kind::kReduceScatter,
                                      .dtype = input.scalar_type(),
                                      .op = op,
                                      .count = input.numel()}),
        output_(output),
        input_(input) {}

 protected:
  void post() override {
    const int64_t count = output_.numel();
    scratch_ = take_scratch(output_.scalar_type(), count);
    recv_slices(scratch_, output_.scalar_type(), count, 0);
    for (int k = 1; k < size(); ++k) send(slice(input_, after(k) * count, count), after(k));
  }

  bool complete() override {
    const int64_t count = output_.numel();
    const int64_t begin = rank() * count;
    fold(call().op, slice(input_, begin, count), std::move(scratch_), input_.numel(), begin,
         output_);
    return true;
  }

 private:
  const at::Tensor output_;
  const at::Tensor input_;
  at::Tensor scratch_;
};

/// Every rank sends the whole tensor to every rank.
class WholeAllReduce final : public Collective {
 public:
  WholeAllReduce(Place place, Call call, const at::Tensor& tensor)
      : Collective(std::move(place), std::move(call)), tensor_(tensor) {}

 protected:
  void post() override {
    scratch_ = take_scratch(tensor_.scalar_type(), tensor_.numel());
    recv_slices(scratch_, tensor_.scalar_type(), tensor_.numel(), 0);
    for (int k = 1; k < size(); ++k) send(tensor_, after(k));
  }

  bool complete() override {
    fold(call().op, tensor_, std::move(scratch_), tensor_.numel(), 0, tensor_);
    return true;
  }

 private:
  const at::Tensor tensor_;
  at::Tensor scratch_;
};

/// Each rank folds one part and gathers the others'.
class PartsAllReduce final : public Collective {
 public:
  PartsAllReduce(Place place, Call call, const at::Tensor& tensor)
      : Collective(std::move(place), std::move(call)), tensor_(tensor) {}

 protected:
  void post() override {
    const at::Tensor own = part(rank());
    scratch_ = take_scratch(own.scalar_type(), own.numel());
    recv_slices(scratch_, own.scalar_type(), own.numel(), kReduce);
    for (int k = 1; k < size(); ++k) send(part(after(k)), after(k), kReduce);
  }

  bool complete() override {
    if (gathers_) return true;
    const at::Tensor own = part(rank());
    fold(call().op, own, std::move(scratch_), tensor_.numel(), begin(rank()), own);
    for (int k = 1; k < size(); ++k) recv(part(before(k)), before(k), kGather);
    for (int k = 1; k < size(); ++k) send(own, after(k), kGather);
    gathers_ = true;
    return false;
  }

 private:
  enum Phase : uint64_t { kReduce, kGather };

  int64_t begin(int rank) const { return tensor_.numel() * rank / size(); }
  at::Tensor part(int rank) const {
    return slice(tensor_, begin(rank), begin(rank + 1) - begin(rank));
  }

  const at::Tensor tensor_;
  at::Tensor scratch_;
  bool gathers_ = false;
};

class Broadcast final : public Collective {
 public:
  Broadcast(Place place, const at::Tensor& tensor, int root)
      : Collective(std::move(place), {.kind = Call::Kind::kBroadcast,
                                      .dtype = tensor.scalar_type(),
                                      .root = root,
                                      .count = tensor.numel()}),
        tensor_(tensor) {}

 protected:
  void post() override {
    const int root = static_cast<int>(call().root);
    if (rank() != root) return recv(tensor_, root);
    for (int k = 1; k < size(); ++k) send(tensor_, after(k));
  }

 private:
  const at::Tensor tensor_;
};

class AllToAll final : public Collective {
 public:
  AllToAll(Place place, const at::Tensor& output, const at::Tensor& input,
           const std::vector<int64_t>& output_splits, const std::vector<int64_t>& input_splits)
      : Collective(std::move(place), {.kind = Call::Kind::kAllToAll,
                                      .dtype = input.scalar_type(),
                                      .sends = input_splits,
                                      .receives = output_splits}),
        output_(output),
        input_(input) {}

 protected:
  void post() override {
    for (int k = 1; k < size(); ++k) {
      recv(part(output_, call().receives, before(k)), before(k));
    }
    for (int k = 1; k < size(); ++k) send(part(input_, call().sends, after(k)), after(k));
    copy(part(output_, call().receives, rank()), part(input_, call().sends, rank()));
  }

 private:
  static at::Tensor part(const at::Tensor& whole, const std::vector<int64_t>& splits, int rank) {
    const int64_t begin = std::accumulate(splits.begin(), splits.begin() + rank, int64_t{0});
    return slice(whole, begin, splits[rank]);
  }

  const at::Tensor output_;
  const at::Tensor input_;
};

class Message final : public Exchange {
 public:
  Message(Place place, const at::Tensor& tensor, int sender, int receiver)
      : Exchange(
            place.group,
            {.kind = Call::Kind::kMessage, .dtype = tensor.scalar_type(), .count = tensor.numel()},
            {sender, receiver}, place.number, place.checked),
        tensor_(tensor),
        sender_(sender),
        receiver_(receiver) {}

 protected:
  void post() override {
    if (rank() == receiver_) {
      recv(tensor_, sender_);
    } else {
      send(tensor_, receiver_);
    }
  }

 private:
  const at::Tensor tensor_;
  const int sender_;
  const int receiver_;
};

/// The check alone.
class Agreement final : public Collective {
 public:
  Agreement(Place place, Call call)
      : Collective({std::move(place.group), place.number, /*checked=*/true, std::move(place.label)},
                   std::move(call)) {}

 protected:
  void post() override {}
};

}  // namespace

OperationPtr all_gather_into(Place place, const at::Tensor& output, const at::Tensor& input) {
  return std::make_unique<AllGather>(std::move(place), output, input);
}

OperationPtr reduce_scatter(Place place, const at::Tensor& output, const at::Tensor& input,
                            const comm::ReduceOp& op) {
  return std::make_unique<ReduceScatter>(std::move(place), output, input, op);
}

OperationPtr all_reduce(Place place, const at::Tensor& tensor, const comm::ReduceOp& op) {
  Call call{.kind = Call::Kind::kAllReduce,
            .dtype = tensor.scalar_type(),
            .op = op,
            .count = tensor.numel()};
  if (place.group->size() <= 2 || static_cast<int64_t>(tensor.nbytes()) <= kWholeBytes) {
    return std::make_unique<WholeAllReduce>(std::move(place), std::move(call), tensor);
  }
  return std::make_unique<PartsAllReduce>(std::move(place), std::move(call), tensor);
}

OperationPtr broadcast(Place place, const at::Tensor& tensor, int root) {
  return std::make_unique<Broadcast>(std::move(place), tensor, root);
}

OperationPtr all_to_all(Place place, const at::Tensor& output, const at::Tensor& input,
                        const std::vector<int64_t>& output_splits,
                        const std::vector<int64_t>& input_splits) {
  return std::make_unique<AllToAll>(std::move(place), output, input, output_splits, input_splits);
}

OperationPtr send(Place place, const at::Tensor& tensor, int peer) {
  const int self = place.group->rank;
  return std::make_unique<Message>(std::move(place), tensor, self, peer);
}

OperationPtr recv(Place place, const at::Tensor& tensor, int peer) {
  const int self = place.group->rank;
  return std::make_unique<Message>(std::move(place), tensor, peer, self);
}

OperationPtr barrier(Place place) {
  return std::make_unique<Agreement>(std::move(place), Call{.kind = Call::Kind::kBarrier});
}

OperationPtr agree_on_subgroup(Place place, const std::vector<int>& members) {
  Call call{.kind = Call::Kind::kSubgroup};
  call.sends.resize(place.group->size());
  for (const int member : members) call.sends[member] = 1;
  return std::make_unique<Agreement>(std::move(place), std::move(call));
}

}  // namespace ppfsdp::gloo
