#include "backends/nccl/operations.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <string>
#include <utility>

#include "backends/nccl/call_record.h"
#include "backends/nccl/types.h"
#include "src/comm/communicator.h"
#include "src/comm/text.h"

namespace ppfsdp::nccl {
namespace {

using comm::Call;

std::string message_key(const Group& group, int from, int to, uint64_t number) {
  return fmt::format("ppfsdp/nccl/message/{}/{}/{}/{}", group.key, from, to, number);
}

/// Whether no rank has anything to move: of all_to_all only this rank can tell for itself.
bool is_empty(const Operation& operation) {
  return operation.output.numel() == 0 &&
         (!operation.input.defined() || operation.input.numel() == 0);
}

/// Calls that are issued together. They are ended even when one is refused, so that the next ones
/// do not join them.
class NcclGroup {
 public:
  NcclGroup() : result_(ncclGroupStart()) {}
  void add(ncclResult_t result) {
    if (result_ == ncclSuccess && result != ncclInProgress) result_ = result;
  }
  ncclResult_t end() {
    const ncclResult_t ended = ncclGroupEnd();
    return result_ == ncclSuccess ? ended : result_;
  }

 private:
  ncclResult_t result_;
};

ncclResult_t enqueue_all_to_all(const Operation& operation, ncclComm_t comm, cudaStream_t stream) {
  const Call& call = operation.what.call;
  const size_t item = operation.input.itemsize();
  const auto* from = static_cast<const char*>(operation.input.const_data_ptr());
  auto* to = static_cast<char*>(operation.output.mutable_data_ptr());
  NcclGroup group;
  for (int peer = 0; peer < static_cast<int>(call.sends.size()); ++peer) {
    const size_t out = call.sends[peer] * item;
    const size_t in = call.receives[peer] * item;
    if (out > 0) group.add(ncclSend(from, out, ncclUint8, peer, comm, stream));
    if (in > 0) group.add(ncclRecv(to, in, ncclUint8, peer, comm, stream));
    from += out;
    to += in;
  }
  return group.end();
}

/// `op`: of reductions.
ncclResult_t enqueue(const Operation& operation, ncclRedOp_t op, ncclComm_t comm,
                     cudaStream_t stream) {
  const Call& call = operation.what.call;
  void* const output = operation.output.mutable_data_ptr();
  // What only moves goes as bytes, so that every dtype does.
  switch (call.kind) {
    case Call::Kind::kAllGatherInto:
      return ncclAllGather(operation.input.const_data_ptr(), output, operation.input.nbytes(),
                           ncclUint8, comm, stream);
    case Call::Kind::kBroadcast:
      return ncclBroadcast(output, output, operation.output.nbytes(), ncclUint8,
                           static_cast<int>(call.root), comm, stream);
    case Call::Kind::kAllToAll:
      return enqueue_all_to_all(operation, comm, stream);
    case Call::Kind::kReduceScatter:
      return ncclReduceScatter(operation.input.const_data_ptr(), output, operation.output.numel(),
                               *reduced_as(call.dtype), op, comm, stream);
    case Call::Kind::kAllReduce:
    case Call::Kind::kBarrier:
      return ncclAllReduce(output, output, operation.output.numel(), *reduced_as(call.dtype), op,
                           comm, stream);
    case Call::Kind::kMessage:
      return operation.what.sends ? ncclSend(output, operation.output.nbytes(), ncclUint8,
                                             operation.what.peer, comm, stream)
                                  : ncclRecv(output, operation.output.nbytes(), ncclUint8,
                                             operation.what.peer, comm, stream);
    case Call::Kind::kSubgroup:
      break;
  }
  TORCH_INTERNAL_ASSERT(false, "nothing to enqueue for ", comm::name_of(call.kind));
}

}  // namespace

Issuer::Issuer(std::shared_ptr<Endpoint> endpoint, GroupPtr group, std::shared_ptr<Handle> handle)
    : endpoint_(std::move(endpoint)),
      group_(std::move(group)),
      handle_(std::move(handle)),
      buffers_(std::make_shared<BufferPool>(endpoint_, handle_)),
      sent_(group_->size(), 0),
      received_(group_->size(), 0) {}

std::unique_ptr<Check> Issuer::start_check(const What& what, bool lists, NcclStream& stream) {
  return std::make_unique<Check>(*endpoint_, *handle_, what, lists, stream);
}

void Issuer::finish_check(const What& what, const Check& check, NcclStream& stream) {
  const auto compare = [&](const Check& check) {
    // For the watchdog the comparison is the operation: it is where ranks wait for each other.
    note(what, stream, nullptr, /*prelude=*/true);
    endpoint_->host_wait(check.done());
    if (const auto difference = check.find_difference()) endpoint_->raise(what, *difference);
  };
  compare(check);
  // Now all ranks know that they are in the same operation, so that all or none go on to this.
  if (has_lists(what.call.kind)) compare(*start_check(what, /*lists=*/true, stream));
}

void Issuer::collective(Operation operation, const std::shared_ptr<NcclStream>& stream) {
  endpoint_->check_alive();
  issue();
  stream->issue_deferred();
  const uint64_t number = operation.what.number;
  const bool alone = group_->size() == 1;
  if (!alone && number < endpoint_->settings.checked) {
    auto check = start_check(operation.what, /*lists=*/false, *stream);
    if (!stream->is_compute()) {
      waiting_.push_back({std::move(operation), stream, std::move(check)});
      stream->defer(shared_from_this());
      return;
    }
    finish_check(operation.what, *check, *stream);
    return launch(std::move(operation), *stream);
  }
  const bool compared =
      !alone && number % comm::kComparePeriod == 0 && endpoint_->settings.checked > 0;
  if (compared) {
    // Found when it is done, which the operation may never be.
    note(operation.what, *stream, start_check(operation.what, /*lists=*/false, *stream),
         /*prelude=*/true);
  }
  launch(std::move(operation), *stream);
}

void Issuer::agree(const What& what, NcclStream& stream) {
  endpoint_->check_alive();
  issue();
  stream.issue_deferred();
  finish_check(what, *start_check(what, /*lists=*/false, stream), stream);
}

void Issuer::message(const at::Tensor& tensor, int peer, bool sends,
                     const std::shared_ptr<NcclStream>& stream) {
  endpoint_->check_alive();
  // A collective that waits comes first; messages that wait may come together with this one.
  if (!waiting_.empty() && waiting_.front().check != nullptr) issue();
  Operation operation;
  operation.output = tensor;
  operation.what = {group_, (sends ? sent_ : received_)[peer]++, {}, peer, sends};
  Call& call = operation.what.call;
  call.kind = Call::Kind::kMessage;
  call.dtype = tensor.scalar_type();
  call.count = tensor.numel();
  if (sends && operation.what.number < endpoint_->settings.checked) {
    std::vector<int64_t> record(record_words());
    write_record(call, record.data());
    const auto* bytes = reinterpret_cast<const uint8_t*>(record.data());
    ask_store(operation.what, [&](c10d::Store& store) {
      store.set(message_key(*group_, group_->index, peer, operation.what.number),
                std::vector<uint8_t>(bytes, bytes + record.size() * sizeof(int64_t)));
    });
  }
  if (stream->is_compute()) {
    issue();
    stream->issue_deferred();
    std::vector<Waiting> one;
    one.push_back({std::move(operation), stream, nullptr});
    return launch_messages(std::move(one));
  }
  waiting_.push_back({std::move(operation), stream, nullptr});
  stream->defer(shared_from_this());
}

void Issuer::ask_store(const What& what, c10::function_ref<void(c10d::Store&)> ask) {
  try {
    ask(*endpoint_->settings.store);
  } catch (const comm::CommError&) {
    throw;
  } catch (const std::exception& error) {
    endpoint_->raise(what, fmt::format("the store on rank 0 cannot be reached ({})",
                                       comm::first_line(error.what())));
  }
}

void Issuer::compare_with_sender(const What& what) {
  const std::string key = message_key(*group_, what.peer, group_->index, what.number);
  bool there = false;
  ask_store(what, [&](c10d::Store&) { there = endpoint_->wait_for_key(key); });
  if (!there) {
    endpoint_->raise_asking(what,
                            fmt::format("rank {} did not send within {}", group_->ranks[what.peer],
                                        comm::seconds(endpoint_->settings.timeout)));
  }
  std::vector<uint8_t> sent;
  ask_store(what, [&](c10d::Store& store) {
    sent = store.get(key);
    store.deleteKey(key);
  });
  // The sender's record, then this rank's.
  const size_t words = record_words();
  std::vector<int64_t> records(2 * words);
  std::memcpy(records.data(), sent.data(), std::min(sent.size(), words * sizeof(int64_t)));
  write_record(what.call, records.data() + words);
  const auto difference =
      find_record_difference(records.data(), 2, {group_->ranks[what.peer], group_->rank()});
  if (difference) endpoint_->raise(what, *difference);
}

void Issuer::launch_messages(std::vector<Waiting> messages) {
  for (const Waiting& message : messages) {
    const What& what = message.operation.what;
    if (!what.sends && what.number < endpoint_->settings.checked) compare_with_sender(what);
  }
  // All on one stream, in which the others' work before and after is brought into order: what NCCL
  // makes of several streams in a group is the same.
  const std::shared_ptr<NcclStream>& carrier = messages.front().stream;
  std::vector<NcclStream*> others;
  for (const Waiting& message : messages) {
    NcclStream* const stream = message.stream.get();
    if (stream != carrier.get() &&
        std::find(others.begin(), others.end(), stream) == others.end()) {
      others.push_back(stream);
    }
  }
  for (const NcclStream* other : others) other->mark()->block(carrier->stream());
  handle_->call(
      [&](ncclComm_t comm) {
        NcclGroup group;
        for (const Waiting& message : messages) {
          if (message.operation.output.numel() == 0) continue;
          group.add(enqueue(message.operation, ncclSum, comm, carrier->native()));
        }
        return group.end();
      },
      messages.front().operation.what);
  if (!others.empty()) {
    const EventPool::Handle end = carrier->mark();
    for (const NcclStream* other : others) end->block(other->stream());
  }
  for (Waiting& message : messages) {
    message.stream->keep(message.operation.output, {});
    note(std::move(message.operation.what), *carrier);
  }
}

void Issuer::launch(Operation operation, NcclStream& stream) {
  const What& what = operation.what;
  const Call& call = what.call;
  if (is_empty(operation)) return note(std::move(operation.what), stream);
  const bool reduces = call.kind == Call::Kind::kReduceScatter ||
                       call.kind == Call::Kind::kAllReduce || call.kind == Call::Kind::kBarrier;
  const bool premul = reduces && call.op.kind == comm::ReduceOp::Kind::kPremulSum;
  ncclRedOp_t op = reduces && !premul ? builtin_op(call.op.kind) : ncclSum;
  if (premul) {
    Scalar factor = scalar_of(call.op.factor, call.dtype);
    handle_->call(
        [&](ncclComm_t comm) {
          return ncclRedOpCreatePreMulSum(&op, factor.bytes.data(), *reduced_as(call.dtype),
                                          ncclScalarHostImmediate, comm);
        },
        what);
  }
  handle_->call([&](ncclComm_t comm) { return enqueue(operation, op, comm, stream.native()); },
                what);
  if (premul) handle_->call([&](ncclComm_t comm) { return ncclRedOpDestroy(op, comm); }, what);
  stream.keep(operation.output, operation.input);
  note(std::move(operation.what), stream);
}

void Issuer::note(What what, const NcclStream& stream, std::shared_ptr<const Check> check,
                  bool prelude) {
  endpoint_->log.add({std::move(what), &stream, std::chrono::steady_clock::now(), stream.mark(),
                      std::move(check), prelude});
}

void Issuer::issue() {
  if (waiting_.empty()) return;
  endpoint_->check_alive();
  std::vector<Waiting> waiting = std::exchange(waiting_, {});
  Waiting& first = waiting.front();
  if (first.check == nullptr) return launch_messages(std::move(waiting));
  finish_check(first.operation.what, *first.check, *first.stream);
  launch(std::move(first.operation), *first.stream);
}

void Issuer::end() {
  waiting_.clear();
  buffers_->close();
}

}  // namespace ppfsdp::nccl
