#include "backends/gloo/exchange.h"

#include <ATen/ops/empty.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <bit>
#include <utility>

#include "src/comm/communicator.h"
#include "src/comm/text.h"

namespace ppfsdp::gloo {
namespace {

at::Tensor view(const at::Tensor& memory, c10::ScalarType dtype, int64_t offset, int64_t count) {
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(memory.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU),
      c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_storage_offset(offset);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({count});
  return tensor;
}

}  // namespace

at::Tensor slice(const at::Tensor& whole, int64_t begin, int64_t count) {
  return view(whole, whole.scalar_type(), whole.storage_offset() + begin, count);
}

at::Tensor slice_as(const at::Tensor& scratch, c10::ScalarType dtype, int64_t begin,
                    int64_t count) {
  return view(scratch, dtype, begin, count);
}

Exchange::Exchange(std::shared_ptr<Group> group, Call call, std::vector<int> parties,
                   uint64_t number, bool checked)
    : group_(std::move(group)),
      call_(std::move(call)),
      parties_(std::move(parties)),
      number_(number),
      checked_(checked && parties_.size() > 1),
      channel_(call_.kind == Call::Kind::kMessage
                   ? 1 + comm::hash({static_cast<uint64_t>(parties_[0]),
                                     static_cast<uint64_t>(parties_[1])})
                   : 0),
      label_(comm::hash(call_.label)) {}

void Exchange::start() {
  group_->endpoint->check_alive();
  if (checked_) post_check();
  check_transfers_ = pending_.size();
  post();
}

void Exchange::await() {
  for (size_t i = 0; i < pending_.size(); ++i) {
    if (i == check_transfers_ && i > 0) compare();
    await(pending_[i]);
  }
  if (check_transfers_ > 0 && check_transfers_ == pending_.size()) compare();
}

bool Exchange::finish() {
  pending_.clear();
  check_transfers_ = 0;
  return complete();
}

void Exchange::abort() {
  aborted_ = true;
  for (const Pending& pending : pending_) Transport::abort(pending.transfer);
}

uint32_t Exchange::tag(const at::Tensor& tensor, int from, int to, uint64_t phase) const {
  // Not the count of the call but of the transfer: those of an all_to_all differ.
  return comm::make_tag({group_->id, channel_, number_, static_cast<uint64_t>(call_.kind),
                         static_cast<uint64_t>(call_.dtype), static_cast<uint64_t>(call_.op.kind),
                         std::bit_cast<uint64_t>(call_.op.factor),
                         static_cast<uint64_t>(call_.root), label_,
                         static_cast<uint64_t>(tensor.numel()), static_cast<uint64_t>(from),
                         static_cast<uint64_t>(to), phase});
}

void Exchange::send(const at::Tensor& tensor, int peer, uint64_t phase) {
  if (tensor.numel() == 0) return;
  try {
    pending_.push_back({group_->endpoint->transport->send(tensor, group_->ranks[peer],
                                                          tag(tensor, rank(), peer, phase)),
                        peer, false});
  } catch (const std::exception& error) {
    raise_transfer_error(peer, false, error);
  }
}

void Exchange::recv(const at::Tensor& tensor, int peer, uint64_t phase) {
  if (tensor.numel() == 0) return;
  try {
    pending_.push_back({group_->endpoint->transport->recv(tensor, group_->ranks[peer],
                                                          tag(tensor, peer, rank(), phase)),
                        peer, true});
  } catch (const std::exception& error) {
    raise_transfer_error(peer, true, error);
  }
}

void Exchange::post_check() {
  const int n = static_cast<int>(parties_.size());
  const auto length = static_cast<int64_t>(comm::encoded_size(n));
  calls_ = at::empty({n * length}, at::kLong);
  int64_t self = 0;
  while (parties_[self] != rank()) ++self;
  comm::encode(call_, n, calls_.mutable_data_ptr<int64_t>() + self * length);
  const at::Tensor mine = slice(calls_, self * length, length);
  // The tag must not depend on the call: this is how ranks learn that theirs differ.
  const auto tag_of = [&](int from, int to) {
    constexpr uint64_t kCheck = 0xc0117a11;
    return comm::make_tag({group_->id, channel_, number_, kCheck, static_cast<uint64_t>(from),
                           static_cast<uint64_t>(to)});
  };
  Transport& transport = *group_->endpoint->transport;
  for (const bool receives : {true, false}) {
    for (int k = 1; k < n; ++k) {
      const int64_t other = receives ? (self + n - k) % n : (self + k) % n;
      const int peer = parties_[other];
      try {
        pending_.push_back({receives
                                ? transport.recv(slice(calls_, other * length, length),
                                                 group_->ranks[peer], tag_of(peer, rank()))
                                : transport.send(mine, group_->ranks[peer], tag_of(rank(), peer)),
                            peer, receives});
      } catch (const std::exception& error) {
        raise_transfer_error(peer, receives, error);
      }
    }
  }
}

void Exchange::compare() const {
  std::vector<int> names;
  for (const int party : parties_) names.push_back(group_->ranks[party]);
  const auto difference = comm::find_difference(calls_.const_data_ptr<int64_t>(),
                                                static_cast<int>(parties_.size()), names);
  if (difference) raise(*difference);
}

void Exchange::await(const Pending& pending) {
  bool done = false;
  try {
    done = Transport::wait(pending.transfer, group_->endpoint->timeout);
  } catch (const std::exception& error) {
    raise_transfer_error(pending.peer, pending.receives, error);
  }
  // Nobody reads the error of an operation that is being destroyed.
  if (!done || aborted_) throw comm::CommError("aborted");
}

void Exchange::raise(const std::string& what) const {
  const std::string message =
      fmt::format("{} on group '{}', operation {}: {}; this is rank {}", call_.to_string(),
                  group_->name, number_, what, group_->ranks[rank()]);
  group_->endpoint->fail(message);
  throw comm::CommError(message);
}

void Exchange::raise_transfer_error(int peer, bool receives, const std::exception& error) const {
  const std::string text = comm::first_line(error.what());
  const auto says = [&](const char* words) { return text.find(words) != std::string::npos; };
  const int name = group_->ranks[peer];
  if (says("Timed out waiting")) {
    raise(fmt::format("rank {} did not {} within {}", name, receives ? "send" : "receive",
                      comm::seconds(group_->endpoint->timeout)));
  }
  if (says("Connection closed by peer") || says("Connection reset") || says("Broken pipe") ||
      says("Socket closed")) {
    raise(fmt::format("rank {} closed its connection: it ended or failed", name));
  }
  raise(
      fmt::format("{} rank {} failed: {}", receives ? "receiving from" : "sending to", name, text));
}

}  // namespace ppfsdp::gloo
