#include "sim/mesh/operation.h"

#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "sim/mesh/poison.h"
#include "sim/mesh/shared_memory.h"
#include "sim/mesh/sim_stream.h"
#include "sim/mesh/world_state.h"
#include "src/comm/communicator.h"
#include "src/comm/reduction.h"

namespace ppfsdp::sim {
namespace {

using Kind = Request::Kind;

const char* bytes_of(const at::Tensor& tensor) {
  return static_cast<const char*>(tensor.const_data_ptr());
}

char* mutable_bytes_of(const at::Tensor& tensor) {
  return static_cast<char*>(tensor.mutable_data_ptr());
}

void copy_bytes(void* to, const void* from, size_t bytes) {
  if (to != from && bytes != 0) std::memcpy(to, from, bytes);
}

/// The tensor whose size, the same on every rank, is part of the signature.
const at::Tensor& unit(const Request& request) {
  switch (request.kind) {
    case Kind::kAllGather:
    case Kind::kSend:
      return request.input;
    default:
      return request.output;
  }
}

bool moves_data(Kind kind) { return kind != Kind::kBarrier && kind != Kind::kSubgroup; }

/// Send and recv are two sides of one transfer.
bool same_kind(Kind a, Kind b) {
  const auto is_transfer = [](Kind kind) { return kind == Kind::kSend || kind == Kind::kRecv; };
  return a == b || (is_transfer(a) && is_transfer(b));
}

/// Whether the requests agree; splits and members, which differ by rank, are compared elsewhere.
bool agree(const Request& a, const Request& b) {
  if (!same_kind(a.kind, b.kind)) return false;
  if (!moves_data(a.kind)) return true;
  if (unit(a).scalar_type() != unit(b).scalar_type()) return false;
  // The parts of an all-to-all differ in size; its splits tell.
  if (a.kind != Kind::kAllToAll && unit(a).numel() != unit(b).numel()) return false;
  return a.op == b.op && a.label == b.label && (a.kind != Kind::kBroadcast || a.root == b.root);
}

int64_t sum_before(const std::vector<int64_t>& splits, int index) {
  int64_t sum = 0;
  for (int i = 0; i < index; ++i) sum += splits[i];
  return sum;
}

}  // namespace

const char* to_string(Kind kind) {
  switch (kind) {
    case Kind::kAllGather:
      return "all_gather_into";
    case Kind::kReduceScatter:
      return "reduce_scatter";
    case Kind::kAllReduce:
      return "all_reduce";
    case Kind::kBroadcast:
      return "broadcast";
    case Kind::kAllToAll:
      return "all_to_all";
    case Kind::kSend:
      return "send";
    case Kind::kRecv:
      return "recv";
    case Kind::kBarrier:
      return "barrier";
    case Kind::kSubgroup:
      return "subgroup";
  }
  TORCH_INTERNAL_ASSERT(false, "unknown kind of request ", static_cast<int>(kind));
}

std::string Request::signature() const {
  const std::string function = to_string(kind);
  if (kind == Kind::kBarrier) return function + "()";
  if (kind == Kind::kSubgroup) {
    return fmt::format("{}([{}], '{}')", function, fmt::join(members, ", "), name);
  }
  const char* dtype = c10::toString(unit(*this).scalar_type());
  if (kind == Kind::kAllToAll) {
    return fmt::format("{}({}, output splits [{}], input splits [{}])", function, dtype,
                       fmt::join(output_splits, ", "), fmt::join(input_splits, ", "));
  }
  std::string more;
  if (kind == Kind::kReduceScatter || kind == Kind::kAllReduce) {
    more = ", " + comm::to_string(op);
  } else if (kind == Kind::kBroadcast) {
    more = fmt::format(", root {}", root);
  }
  const std::string what = label.empty() ? "" : fmt::format(" for '{}'", label);
  return fmt::format("{}({}, {} elements{}){}", function, dtype, unit(*this).numel(), more, what);
}

Operation::Operation(World& world, GroupPtr group, std::vector<int> members, std::string label)
    : world_(world),
      group_(std::move(group)),
      members_(std::move(members)),
      label_(std::move(label)),
      participants_(members_.size()) {}

std::string Operation::where() const {
  return fmt::format("{} on group '{}'", label_, group_->name);
}

std::string Operation::rank_name(int index) const {
  const int rank = members_[index];
  const int world_rank = group_->ranks[rank];
  if (rank == world_rank) return fmt::format("rank {}", rank);
  return fmt::format("rank {} (rank {} of the world)", rank, world_rank);
}

void Operation::check_match(int index, const Request& request) const {
  for (int other = 0; other < size(); ++other) {
    const Participant& participant = participants_[other];
    if (participant.stream == nullptr) continue;
    const Request& theirs = participant.request;
    bool matches = agree(request, theirs);
    if (matches && request.kind == Kind::kAllToAll) {
      matches = request.input_splits[other] == theirs.output_splits[index] &&
                request.output_splits[other] == theirs.input_splits[index];
    }
    if (matches && request.kind == Kind::kSubgroup) {
      // Two lists are equal or share no member.
      const bool together =
          std::binary_search(request.members.begin(), request.members.end(), other) ||
          std::binary_search(theirs.members.begin(), theirs.members.end(), index);
      matches = !together || (request.members == theirs.members && request.name == theirs.name);
    }
    if (!matches) {
      throw comm::CommError(fmt::format("{}: {} called {}, but {} called {}", where(),
                                        rank_name(index), request.signature(), rank_name(other),
                                        theirs.signature()));
    }
    // What is compared without regard to the rank was compared among the others already.
    if (request.kind != Kind::kAllToAll && request.kind != Kind::kSubgroup) return;
  }
}

void Operation::issue(int index, Request request, StreamQueue& stream) {
  check_match(index, request);
  Participant& participant = participants_[index];
  participant.request = std::move(request);
  participant.stream = &stream;
  ++issued_;
}

bool Operation::arrive(int index) {
  participants_[index].arrived = true;
  ++arrived_;
  world_.add_in_flight(participants_[index].stream->rank(), *this, index);
  return arrived_ == size();
}

void Operation::run() {
  for (const Participant& participant : participants_) {
    const int rank = participant.stream->rank();
    world_.remove_in_flight(rank, *this);
    // Its inputs may be the outputs of another operation that has not run.
    world_.poison_in_flight(rank);
  }
  const Kind kind = participants_[0].request.kind;
  if (kind == Kind::kSubgroup) {
    make_groups();
  } else if (moves_data(kind)) {
    move_data();
  }
  done_ = true;
  for (Participant& participant : participants_) {
    participant.request = Request();
    participant.stream->pop_operation();
  }
}

void Operation::make_groups() {
  for (int index = 0; index < size(); ++index) {
    Participant& participant = participants_[index];
    const std::vector<int>& members = participant.request.members;
    if (members.front() != index) {
      participant.new_group = participants_[members.front()].new_group;
      continue;
    }
    std::vector<int> ranks;
    ranks.reserve(members.size());
    for (const int member : members) ranks.push_back(group_->ranks[member]);
    participant.new_group = world_.add_group(participant.request.name, std::move(ranks));
  }
}

void Operation::gather() {
  const auto gather_to = [&](char* output) {
    for (const Participant& from : participants_) {
      const at::Tensor& input = from.request.input;
      copy_bytes(output, bytes_of(input), input.nbytes());
      output += input.nbytes();
    }
  };
  std::optional<SharedMemory> shared;
  for (const Participant& to : participants_) {
    const at::Tensor& output = to.request.output;
    if (!to.request.shares_output) {
      gather_to(mutable_bytes_of(output));
      continue;
    }
    if (!shared.has_value()) gather_to(shared.emplace(output.nbytes()).data());
    shared->put_under(*output.storage().unsafeGetStorageImpl(), output.nbytes());
  }
}

void Operation::move_data() {
  const Request& first = participants_[0].request;
  switch (first.kind) {
    case Kind::kAllGather:
      gather();
      break;
    case Kind::kReduceScatter: {
      std::vector<at::Tensor> inputs;
      inputs.reserve(participants_.size());
      for (const Participant& from : participants_) inputs.push_back(from.request.input);
      const int64_t count = first.output.numel();
      for (int to = 0; to < size(); ++to) {
        comm::reduce_range(world_.options().order, first.op, inputs, to * count, (to + 1) * count,
                           participants_[to].request.output);
      }
      break;
    }
    case Kind::kAllReduce: {
      std::vector<at::Tensor> inputs;
      inputs.reserve(participants_.size());
      for (const Participant& from : participants_) inputs.push_back(from.request.input);
      const at::Tensor& output = first.output;
      comm::reduce_range(world_.options().order, first.op, inputs, 0, output.numel(), output);
      for (const Participant& to : participants_) {
        copy_bytes(mutable_bytes_of(to.request.output), bytes_of(output), output.nbytes());
      }
      break;
    }
    case Kind::kBroadcast: {
      const at::Tensor& input = participants_[first.root].request.input;
      for (const Participant& to : participants_) {
        copy_bytes(mutable_bytes_of(to.request.output), bytes_of(input), input.nbytes());
      }
      break;
    }
    case Kind::kAllToAll: {
      const size_t item = first.output.itemsize();
      for (int to = 0; to < size(); ++to) {
        char* output = mutable_bytes_of(participants_[to].request.output);
        for (int from = 0; from < size(); ++from) {
          const Request& source = participants_[from].request;
          const size_t bytes = source.input_splits[to] * item;
          copy_bytes(output, bytes_of(source.input) + sum_before(source.input_splits, to) * item,
                     bytes);
          output += bytes;
        }
      }
      break;
    }
    case Kind::kSend:
    case Kind::kRecv: {
      const at::Tensor& input = participants_[0].request.input;
      copy_bytes(mutable_bytes_of(participants_[1].request.output), bytes_of(input),
                 input.nbytes());
      break;
    }
    case Kind::kBarrier:
    case Kind::kSubgroup:
      break;
  }
}

void Operation::poison_outputs(int index) {
  Request& request = participants_[index].request;
  const at::Tensor& output = request.output;
  if (!output.defined() || output.nbytes() == 0 || request.shares_output) return;
  char* data = mutable_bytes_of(output);
  switch (request.kind) {
    case Kind::kAllGather: {
      const char* own = bytes_of(request.input);
      const char* end = data + output.nbytes();
      if (own < data || own >= end) return poison(data, output.nbytes());
      // In place: the rank's own slot is the input.
      const auto before = static_cast<size_t>(own - data);
      poison(data, before);
      const size_t behind = before + request.input.nbytes();
      return poison(data + behind, output.nbytes() - behind);
    }
    case Kind::kReduceScatter: {
      const char* input = bytes_of(request.input);
      const bool in_place = data >= input && data < input + request.input.nbytes();
      return in_place ? void() : poison(data, output.nbytes());
    }
    case Kind::kAllReduce: {
      at::Tensor aside = at::empty_like(output);
      std::memcpy(aside.mutable_data_ptr(), data, output.nbytes());
      request.input = std::move(aside);
      return poison(data, output.nbytes());
    }
    case Kind::kBroadcast:
      // The root's tensor is only read.
      return request.input.defined() ? void() : poison(data, output.nbytes());
    case Kind::kAllToAll:
    case Kind::kRecv:
      return poison(data, output.nbytes());
    case Kind::kSend:
    case Kind::kBarrier:
    case Kind::kSubgroup:
      return;
  }
}

std::string Operation::describe_missing() const {
  std::vector<std::string> returned, missing, queued;
  for (int index = 0; index < size(); ++index) {
    const Participant& participant = participants_[index];
    const int world_rank = group_->ranks[members_[index]];
    if (participant.arrived) continue;
    if (participant.stream != nullptr) {
      queued.push_back(fmt::format("{} has it behind other work on stream '{}'", rank_name(index),
                                   participant.stream->name()));
    } else if (world_.scheduler().has_returned(world_rank)) {
      returned.push_back(rank_name(index));
    } else {
      missing.push_back(rank_name(index));
    }
  }
  std::string text;
  const auto append = [&](const char* what, const std::vector<std::string>& names) {
    if (names.empty()) return;
    text += text.empty() ? " (" : "; ";
    text += fmt::format("{}{}", what, fmt::join(names, ", "));
  };
  append("returned without it: ", returned);
  append("not issued by ", missing);
  append("", queued);
  return text.empty() ? text : text + ")";
}

}  // namespace ppfsdp::sim
