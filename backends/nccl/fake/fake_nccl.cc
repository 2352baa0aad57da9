#include "backends/nccl/fake/fake_nccl.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <iterator>

#include "backends/nccl/fake/fake_clique.h"
#include "backends/nccl/fake/fake_state.h"

namespace ppfsdp::nccl::testing {

namespace {

using State = FakeNccl::State;
using Phase = ncclComm::Phase;
using Kind = NcclFault::Kind;

std::atomic<State*> active{nullptr};

/// A launch on its stream.
class LaunchTask final : public StreamTask {
 public:
  LaunchTask(State& state, std::shared_ptr<Launch> launch)
      : state_(state), launch_(std::move(launch)) {}

  bool poll() override {
    if (launch_->dropped) return true;
    ncclComm& comm = *launch_->comm;
    if (comm.launches.front() != launch_ || state_.stopped.contains(comm.world_rank) ||
        !std::all_of(launch_->after.begin(), launch_->after.end(),
                     [](const StreamPoint& point) { return point.reached(); })) {
      return false;
    }
    if (!launch_->started) {
      launch_->started = true;
      for (Operation& operation : launch_->operations) comm.clique->arrive(operation);
      // Others may be done by it.
      state_.devices.wake();
    }
    if (!std::all_of(launch_->operations.begin(), launch_->operations.end(),
                     [](const Operation& operation) { return operation.done; })) {
      return false;
    }
    comm.launches.pop_front();
    state_.devices.wake();
    return true;
  }

  void add_needs(std::vector<StreamPoint>& points) const override {
    if (launch_->dropped) return;
    points.insert(points.end(), launch_->after.begin(), launch_->after.end());
    if (const Launch& first = *launch_->comm->launches.front(); &first != launch_.get()) {
      points.push_back(first.point);
      return;
    }
    for (const ncclComm* member : launch_->comm->clique->members) {
      if (member != nullptr && !member->launches.empty()) {
        points.push_back(member->launches.front()->point);
      }
    }
  }

 private:
  State& state_;
  std::shared_ptr<Launch> launch_;
};

ncclComm* find(const State& state, ncclComm_t comm) {
  for (const auto& known : state.comms) {
    if (known.get() == comm) return known.get();
  }
  return nullptr;
}

void commit(State& state, std::shared_ptr<Launch> launch) {
  launch->comm->launches.push_back(launch);
  for (const FakeStream* other : launch->others) launch->after.push_back(other->end());
  launch->point =
      state.devices.enqueue(*launch->stream, std::make_unique<LaunchTask>(state, launch));
  for (FakeStream* other : launch->others) {
    state.devices.enqueue(*other, make_wait(launch->point));
  }
}

void finish_split(State& state, ncclComm& comm) {
  Clique& clique = *comm.clique;
  const auto round = clique.splits.find(comm.splits - 1);
  if (round->second.size() < clique.members.size()) return;
  const SplitCall& mine = round->second.at(comm.rank);
  if (mine.child != nullptr && mine.child->clique == nullptr) {
    std::vector<std::pair<int, int>> order;
    for (const auto& [rank, call] : round->second) {
      if (call.color == mine.color) order.emplace_back(call.key, rank);
    }
    std::sort(order.begin(), order.end());
    const auto made = std::make_shared<Clique>(static_cast<int>(order.size()));
    for (size_t i = 0; i < order.size(); ++i) {
      ncclComm* child = round->second.at(order[i].second).child;
      made->members[i] = child;
      child->clique = made;
      child->rank = static_cast<int>(i);
      if (child->blocking) child->phase = Phase::kReady;
    }
  }
  *comm.made = mine.child;
  comm.phase = Phase::kReady;
}

}  // namespace

FakeNccl::State* active_state() { return active; }

CallGroup& call_group() {
  thread_local CallGroup group;
  return group;
}

void tell(State& state, const std::string& text) {
  if (state.texts.back() != text) state.texts.push_back(text);
}

ncclResult_t misuse(State& state, const std::string& text) {
  state.misuses.push_back(text);
  tell(state, text);
  return ncclInvalidArgument;
}

NcclCall call_of(const ncclComm& comm, std::string function) {
  NcclCall call;
  call.rank = comm.world_rank;
  call.function = std::move(function);
  call.comm = comm.ordinal;
  return call;
}

const NcclFault* note(State& state, NcclCall call) {
  const CallGroup& group = call_group();
  call.group = group.depth > 0 ? group.number : 0;
  state.calls.push_back(call);
  for (const auto& [where, fault] : state.faults) {
    if (where(call)) return &fault;
  }
  return nullptr;
}

void fail(State& state, ncclComm& comm, ncclResult_t result, const std::string& text) {
  comm.error = result;
  comm.text = text;
  tell(state, text);
}

ncclResult_t progress(State& state, ncclComm& comm) {
  if (comm.error != ncclSuccess) return comm.error;
  if (comm.stuck) return ncclInProgress;
  if (comm.polls > 0) {
    --comm.polls;
    return ncclInProgress;
  }
  for (; !comm.held.empty(); comm.held.pop_front()) commit(state, comm.held.front());
  switch (comm.phase) {
    case Phase::kInit:
      if (comm.clique != nullptr && comm.clique->complete()) comm.phase = Phase::kReady;
      return comm.phase == Phase::kReady ? ncclSuccess : ncclInProgress;
    case Phase::kSplitting:
      finish_split(state, comm);
      return comm.phase == Phase::kReady ? ncclSuccess : ncclInProgress;
    case Phase::kFinalizing:
      if (comm.launches.empty() &&
          comm.clique->finalizing == static_cast<int>(comm.clique->members.size())) {
        comm.phase = Phase::kFinalized;
      }
      return comm.phase == Phase::kFinalized ? ncclSuccess : ncclInProgress;
    default:
      return ncclSuccess;
  }
}

ncclResult_t result_of(State& state, std::unique_lock<std::mutex>& lock, ncclComm& comm,
                       const NcclFault* fault) {
  const bool blocks = fault != nullptr && fault->kind == Kind::kBlocks;
  if (fault != nullptr && fault->kind == Kind::kInProgress) comm.polls = fault->polls;
  if (!comm.blocking && !blocks) {
    const bool later = comm.polls > 0 || comm.stuck || comm.phase != Phase::kReady;
    return later ? ncclInProgress : progress(state, comm);
  }
  // What a communicator that blocks waits for happens on other ranks and on streams.
  ++state.blocked;
  ncclResult_t result = ncclInternalError;
  while (!comm.gone() && !state.released) {
    result = progress(state, comm);
    if (result != ncclInProgress && !blocks) break;
    result = ncclInternalError;
    state.changed.wait_for(lock, std::chrono::milliseconds(1));
  }
  --state.blocked;
  state.changed.notify_all();
  return result;
}

ncclResult_t check(State& state, ncclComm_t handle, const char* function) {
  const ncclComm* comm = find(state, handle);
  if (comm == nullptr) return misuse(state, fmt::format("nccl{} on no communicator", function));
  const std::string what =
      fmt::format("nccl{} on rank {}'s communicator {}", function, comm->world_rank, comm->ordinal);
  if (comm->gone()) return misuse(state, what + ", which is destroyed");
  if (comm->error != ncclSuccess) return comm->error;
  if (comm->phase != Phase::kReady || comm->polls > 0 || comm->stuck || !comm->held.empty()) {
    return misuse(state, what + ", for which something is in progress");
  }
  return ncclSuccess;
}

bool is_living(const State& state, ncclComm_t comm) {
  const ncclComm* known = find(state, comm);
  return known != nullptr && !known->gone();
}

void drop_launches(State& state, ncclComm& comm) {
  if (comm.clique != nullptr) comm.clique->withdraw(&comm);
  for (auto* launches : {&comm.held, &comm.launches}) {
    for (const auto& launch : *launches) launch->dropped = true;
    launches->clear();
  }
  state.devices.wake();
}

ncclResult_t submit(State& state, std::unique_lock<std::mutex>& lock,
                    const std::vector<std::shared_ptr<Launch>>& launches, const NcclFault* fault) {
  ncclResult_t result = ncclSuccess;
  for (const auto& launch : launches) {
    ncclComm& comm = *launch->comm;
    if (comm.error != ncclSuccess) {
      // The call that brought it has failed only later.
      commit(state, launch);
      continue;
    }
    if (!comm.blocking) comm.polls = state.polls;
    comm.held.push_back(launch);
    const ncclResult_t one = result_of(state, lock, comm, fault);
    if (one != ncclSuccess) result = one;
  }
  return result;
}

std::string to_string(const Reduction& reduction) {
  switch (reduction.kind) {
    case ncclSum:
      return "sum";
    case ncclProd:
      return "prod";
    case ncclMax:
      return "max";
    case ncclMin:
      return "min";
    case ncclAvg:
      return "avg";
    default:
      return fmt::format("premul({})", reduction.factor);
  }
}

ncclComm& make_comm(State& state, int world_rank, const ncclConfig_t* config, bool blocking) {
  state.comms.push_back(std::make_unique<ncclComm>());
  ncclComm& comm = *state.comms.back();
  comm.world_rank = world_rank;
  comm.ordinal = state.comms_of_rank[world_rank]++;
  comm.blocking = config == nullptr || config->blocking == NCCL_CONFIG_UNDEF_INT
                      ? blocking
                      : config->blocking != 0;
  if (!comm.blocking) comm.polls = state.polls;
  return comm;
}

std::string to_string(const NcclCall& call) {
  std::vector<std::string> parts;
  if (call.comm >= 0) parts.push_back(fmt::format("comm {}", call.comm));
  if (call.stream != nullptr) {
    parts.push_back(fmt::format("{} {}", call.count, name_of(call.dtype)));
  } else if (call.count > 0) {
    parts.push_back(std::to_string(call.count));
  }
  if (call.peer >= 0) parts.push_back(fmt::format("rank {}", call.peer));
  if (!call.detail.empty()) parts.push_back(call.detail);
  return fmt::format("{}({})", call.function, fmt::join(parts, ", "));
}

std::ostream& operator<<(std::ostream& out, const NcclCall& call) { return out << to_string(call); }

FakeNccl::FakeNccl(FakeDevices& devices, int polls)
    : state_(std::make_unique<State>(devices, polls)) {
  State* none = nullptr;
  TORCH_CHECK(active.compare_exchange_strong(none, state_.get()),
              "only one FakeNccl may live at a time");
}

FakeNccl::~FakeNccl() {
  release();
  auto lock = state_->devices.lock();
  state_->changed.wait(lock, [&] { return state_->blocked == 0; });
  for (const auto& comm : state_->comms) drop_launches(*state_, *comm);
  active = nullptr;
}

void FakeNccl::release() {
  const auto lock = state_->devices.lock();
  state_->released = true;
  state_->changed.notify_all();
}

void FakeNccl::inject(Where where, NcclFault fault) {
  const auto lock = state_->devices.lock();
  state_->faults.emplace_back(std::move(where), std::move(fault));
}

void FakeNccl::stop_rank(int rank) {
  const auto lock = state_->devices.lock();
  state_->stopped.insert(rank);
  for (const auto& comm : state_->comms) {
    if (comm->world_rank == rank && comm->clique != nullptr) comm->clique->withdraw(comm.get());
  }
}

void FakeNccl::tell_of_aborts() {
  const auto lock = state_->devices.lock();
  state_->tells_of_aborts = true;
}

std::vector<NcclCall> FakeNccl::calls(int rank) const {
  const auto lock = state_->devices.lock();
  std::vector<NcclCall> mine;
  std::copy_if(state_->calls.begin(), state_->calls.end(), std::back_inserter(mine),
               [&](const NcclCall& call) { return call.rank == rank; });
  return mine;
}

void FakeNccl::clear_calls() {
  const auto lock = state_->devices.lock();
  state_->calls.clear();
}

std::vector<std::string> FakeNccl::misuses() const {
  const auto lock = state_->devices.lock();
  return state_->misuses;
}

FakeNccl::Living FakeNccl::living() const {
  const auto lock = state_->devices.lock();
  Living living;
  living.buffers = static_cast<int>(state_->buffers.size());
  for (const auto& comm : state_->comms) {
    if (!comm->gone()) ++living.comms;
    living.registrations += static_cast<int>(comm->registrations.size());
    living.operators += static_cast<int>(
        std::count_if(comm->operators.begin(), comm->operators.end(),
                      [](const std::unique_ptr<Reduction>& op) { return op != nullptr; }));
  }
  return living;
}

}  // namespace ppfsdp::nccl::testing
