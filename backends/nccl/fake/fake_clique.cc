#include "backends/nccl/fake/fake_clique.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "src/comm/reduction.h"

namespace ppfsdp::nccl::testing {
namespace {

struct Dtype {
  const char* name;
  size_t bytes;
  at::ScalarType reduced_as;
};

constexpr std::array<Dtype, ncclNumTypes> kDtypes = {{{"int8", 1, at::kChar},
                                                      {"uint8", 1, at::kByte},
                                                      {"int32", 4, at::kInt},
                                                      {"uint32", 4, at::kInt},
                                                      {"int64", 8, at::kLong},
                                                      {"uint64", 8, at::kLong},
                                                      {"float16", 2, at::kHalf},
                                                      {"float32", 4, at::kFloat},
                                                      {"float64", 8, at::kDouble},
                                                      {"bfloat16", 2, at::kBFloat16},
                                                      {"float8e4m3", 1, at::kByte},
                                                      {"float8e5m2", 1, at::kByte}}};

const Dtype& info_of(ncclDataType_t dtype) { return kDtypes.at(static_cast<size_t>(dtype)); }

bool is_float(ncclDataType_t dtype) { return c10::isFloatingType(info_of(dtype).reduced_as); }

/// 1 / n as NCCL's average has it: a float, or a double for doubles. reduce_range rounds it to the
/// dtype.
double inverse(int n, ncclDataType_t dtype) {
  return dtype == ncclFloat64 ? 1.0 / n : static_cast<double>(static_cast<float>(1.0 / n));
}

comm::ReduceOp reduce_op(const Operation& operation, int n) {
  switch (operation.reduction.kind) {
    case ncclSum:
      return comm::ReduceOp::sum();
    case ncclMax:
      return comm::ReduceOp::max();
    case ncclMin:
      return comm::ReduceOp::min();
    case ncclAvg:
      TORCH_CHECK(is_float(operation.call.dtype), "the fake averages floating-point dtypes only");
      return comm::ReduceOp::premul_sum(inverse(n, operation.call.dtype));
    case ncclNumOps:
      return comm::ReduceOp::premul_sum(operation.reduction.factor);
    default:
      TORCH_CHECK(false, "the fake has no ncclRedOp_t ",
                  static_cast<int>(operation.reduction.kind));
  }
}

bool match(const Operation& a, const Operation& b) {
  return a.call.function == b.call.function && a.call.count == b.call.count &&
         a.call.dtype == b.call.dtype && a.call.peer == b.call.peer &&
         a.call.detail == b.call.detail;
}

using Operations = std::vector<Operation*>;
using Bytes = std::vector<char>;

size_t bytes_of(const Operation& operation) {
  return operation.call.count * info_of(operation.call.dtype).bytes;
}

const char* input_of(const Operation& operation) {
  return static_cast<const char*>(operation.call.send);
}

char* output_of(const Operation& operation) {
  return static_cast<char*>(const_cast<void*>(operation.call.receive));
}

/// Inputs of `numel` elements a rank, reduced in [begin, end).
Bytes reduced(const Operations& operations, size_t numel, size_t begin, size_t end) {
  const Dtype& dtype = info_of(operations[0]->call.dtype);
  const auto tensor = [&](const void* data, size_t count) {
    return at::from_blob(const_cast<void*>(data), {static_cast<int64_t>(count)}, dtype.reduced_as);
  };
  std::vector<at::Tensor> inputs;
  for (const Operation* operation : operations)
    inputs.push_back(tensor(input_of(*operation), numel));
  Bytes result((end - begin) * dtype.bytes);
  comm::reduce_range(comm::ReductionOrder::kNcclRing,
                     reduce_op(*operations[0], static_cast<int>(operations.size())), inputs,
                     static_cast<int64_t>(begin), static_cast<int64_t>(end),
                     tensor(result.data(), end - begin));
  return result;
}

void move_data(const Operations& operations) {
  const Operation& first = *operations[0];
  const size_t bytes = bytes_of(first);
  const std::string& function = first.call.function;
  if (function == "ReduceScatter") {
    const size_t count = first.call.count;
    // All inputs are read before an output is written, which may lie in one of them.
    std::vector<Bytes> parts;
    for (size_t rank = 0; rank < operations.size(); ++rank) {
      parts.push_back(
          reduced(operations, operations.size() * count, rank * count, (rank + 1) * count));
    }
    for (size_t rank = 0; rank < operations.size(); ++rank) {
      std::memcpy(output_of(*operations[rank]), parts[rank].data(), bytes);
    }
    return;
  }
  Bytes result;
  if (function == "AllGather") {
    for (const Operation* operation : operations) {
      result.insert(result.end(), input_of(*operation), input_of(*operation) + bytes);
    }
  } else if (function == "AllReduce") {
    result = reduced(operations, first.call.count, 0, first.call.count);
  } else {
    TORCH_CHECK(function == "Broadcast", "the fake has no collective ", function);
    const char* from = input_of(*operations.at(static_cast<size_t>(first.call.peer)));
    result.assign(from, from + bytes);
  }
  for (const Operation* operation : operations) {
    std::memcpy(output_of(*operation), result.data(), result.size());
  }
}

}  // namespace

size_t bytes_of(ncclDataType_t dtype) { return info_of(dtype).bytes; }
std::string name_of(ncclDataType_t dtype) { return info_of(dtype).name; }

bool Clique::complete() const {
  return std::all_of(members.begin(), members.end(), [](const ncclComm* member) {
    return member != nullptr && !(member->phase == ncclComm::Phase::kInit && member->stuck);
  });
}

void Clique::arrive(Operation& operation) {
  const int rank = operation.comm->rank;
  const std::string& function = operation.call.function;
  if (function == "Send" || function == "Recv") {
    const bool sends_it = function == "Send";
    const std::pair<int, int> key =
        sends_it ? std::pair(rank, operation.call.peer) : std::pair(operation.call.peer, rank);
    (sends_it ? sends : receives)[key].push_back(&operation);
    auto &from = sends[key], &to = receives[key];
    while (!from.empty() && !to.empty()) {
      Operation &send = *from.front(), &receive = *to.front();
      if (send.never || receive.never || send.call.count != receive.call.count ||
          send.call.dtype != receive.call.dtype) {
        return;
      }
      if (bytes_of(send) > 0) std::memmove(output_of(receive), input_of(send), bytes_of(send));
      send.done = receive.done = true;
      from.pop_front();
      to.pop_front();
    }
    return;
  }
  Operations& all = collectives[operation.number];
  all.resize(members.size());
  all[static_cast<size_t>(rank)] = &operation;
  if (!std::all_of(all.begin(), all.end(), [&](const Operation* other) {
        return other != nullptr && !other->never && match(*other, operation);
      })) {
    return;
  }
  move_data(all);
  for (Operation* other : all) other->done = true;
  collectives.erase(operation.number);
}

void Clique::withdraw(const ncclComm* member) {
  for (auto& [number, all] : collectives) {
    for (Operation*& operation : all) {
      if (operation != nullptr && operation->comm == member) operation = nullptr;
    }
  }
  for (Messages* messages : {&sends, &receives}) {
    for (auto& [key, queue] : *messages) {
      std::erase_if(queue, [&](const Operation* operation) { return operation->comm == member; });
    }
  }
}

}  // namespace ppfsdp::nccl::testing
