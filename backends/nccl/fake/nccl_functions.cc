// The functions that the backend calls: nccl.h's, for the FakeNccl that lives.
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <fmt/format.h>
#include <nccl.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backends/nccl/fake/fake_clique.h"
#include "backends/nccl/fake/fake_device.h"
#include "backends/nccl/fake/fake_nccl.h"
#include "backends/nccl/fake/fake_state.h"

namespace ppfsdp::nccl::testing {
namespace {

/// One communication call. `op` is null where nothing is reduced.
ncclResult_t communicate(const char* function, const void* send, void* receive, size_t count,
                         ncclDataType_t dtype, const ncclRedOp_t* op, int peer, ncclComm_t handle,
                         cudaStream_t stream) {
  FakeNccl::State* state = active_state();
  if (state == nullptr) return ncclInternalError;
  CallGroup& group = call_group();
  auto lock = state->devices.lock();
  const auto refused = [&](ncclResult_t error) {
    if (group.depth > 0) group.error = error;
    return error;
  };
  if (const ncclResult_t wrong = check(*state, handle, function); wrong != ncclSuccess) {
    return refused(wrong);
  }
  ncclComm& comm = *handle;
  Operation operation;
  operation.comm = &comm;
  if (op != nullptr) {
    if (*op < ncclNumOps) {
      operation.reduction.kind = *op;
    } else {
      const auto index = static_cast<size_t>(*op - ncclNumOps);
      if (index >= comm.operators.size() || comm.operators[index] == nullptr) {
        return refused(misuse(*state, fmt::format("nccl{} with operator {}, which is not there",
                                                  function, static_cast<int>(*op))));
      }
      operation.reduction = *comm.operators[index];
    }
  }
  NcclCall& call = operation.call;
  call = call_of(comm, function);
  call.count = count;
  call.dtype = dtype;
  call.peer = peer;
  if (op != nullptr) call.detail = to_string(operation.reduction);
  call.send = send;
  call.receive = receive;
  call.stream = reinterpret_cast<const FakeStream*>(stream);
  call.nth = comm.operations++;
  const NcclFault* fault = note(*state, call);
  const bool message = call.function == "Send" || call.function == "Recv";
  const int size = static_cast<int>(comm.clique->members.size());
  if (stream == nullptr || (count > 0 && send == nullptr && receive == nullptr) ||
      static_cast<size_t>(dtype) >= ncclNumTypes || peer >= size) {
    return refused(misuse(*state, to_string(call) + ": invalid argument"));
  }
  if (fault != nullptr && fault->kind == NcclFault::Kind::kFails) {
    fail(*state, comm, fault->result, fault->text);
    return refused(fault->result);
  }
  if (fault != nullptr && fault->kind == NcclFault::Kind::kFailsLater) {
    operation.never = true;
    fail(*state, comm, fault->result, fault->text);
  }
  if (fault != nullptr && fault->kind == NcclFault::Kind::kNeverDone) operation.never = true;
  if (!message) {
    if (count == 0) return ncclSuccess;
    operation.number = comm.collectives++;
  }
  auto* on = reinterpret_cast<FakeStream*>(stream);
  if (group.depth > 0) {
    const auto launch = std::find_if(group.launches.begin(), group.launches.end(),
                                     [&](const auto& other) { return other->comm == &comm; });
    if (launch == group.launches.end()) {
      group.launches.push_back(
          std::make_shared<Launch>(Launch{.comm = &comm, .stream = on, .operations = {operation}}));
    } else {
      std::vector<FakeStream*>& others = (*launch)->others;
      if ((*launch)->stream != on && std::find(others.begin(), others.end(), on) == others.end()) {
        others.push_back(on);
      }
      (*launch)->operations.push_back(operation);
    }
    return ncclSuccess;
  }
  const auto launch =
      std::make_shared<Launch>(Launch{.comm = &comm, .stream = on, .operations = {operation}});
  return submit(*state, lock, {launch}, fault);
}

std::string describe(const ncclConfig_t* config) {
  if (config == nullptr) return "";
  std::string text;
  const auto add = [&](const char* name, int value) {
    if (value != NCCL_CONFIG_UNDEF_INT) text += fmt::format("{}={} ", name, value);
  };
  add("blocking", config->blocking);
  add("splitShare", config->splitShare);
  if (config->commName != nullptr) text += fmt::format("commName={} ", config->commName);
  if (!text.empty()) text.pop_back();
  return text;
}

bool is_valid(const ncclConfig_t* config) {
  return config == nullptr || (config->size == sizeof(ncclConfig_t) && config->magic == 0xcafebeef);
}

}  // namespace
}  // namespace ppfsdp::nccl::testing

namespace fake = ppfsdp::nccl::testing;
using fake::NcclCall;
using fake::NcclFault;

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error";
    case ncclSystemError:
      return "unhandled system error";
    case ncclInternalError:
      return "internal error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclInvalidUsage:
      return "invalid usage";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
    default:
      return "unknown result code";
  }
}

const char* ncclGetLastError(ncclComm_t comm) {
  fake::FakeNccl::State* state = fake::active_state();
  if (state == nullptr) return "";
  const auto lock = state->devices.lock();
  if (fake::is_living(*state, comm) && !comm->text.empty()) {
    fake::tell(*state, comm->text);
  }
  return state->texts.back().c_str();
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  fake::FakeNccl::State* state = fake::active_state();
  if (state == nullptr) return ncclInternalError;
  const auto lock = state->devices.lock();
  NcclCall call;
  call.rank = fake::current_device();
  call.function = "GetUniqueId";
  const NcclFault* fault = fake::note(*state, call);
  if (fault != nullptr && fault->kind == NcclFault::Kind::kFails) {
    fake::tell(*state, fault->text);
    return fault->result;
  }
  const uint64_t number = ++state->ids;
  *id = {};
  std::memcpy(id->internal, &number, sizeof(number));
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  fake::FakeNccl::State* state = fake::active_state();
  if (state == nullptr) return ncclInternalError;
  auto lock = state->devices.lock();
  uint64_t number = 0;
  std::memcpy(&number, id.internal, sizeof(number));
  if (number == 0 || number > state->ids || rank < 0 || rank >= size || !fake::is_valid(config)) {
    return fake::misuse(*state, "ncclCommInitRankConfig: invalid argument");
  }
  ncclComm& made = fake::make_comm(*state, fake::current_device(), config, /*blocking=*/true);
  auto& clique = state->cliques[number];
  if (clique == nullptr) clique = std::make_shared<fake::Clique>(size);
  if (clique->members.size() != static_cast<size_t>(size) ||
      clique->members[static_cast<size_t>(rank)] != nullptr) {
    made.phase = ncclComm::Phase::kDestroyed;
    return fake::misuse(*state, "ncclCommInitRankConfig: the ranks disagree");
  }
  made.clique = clique;
  made.rank = rank;
  NcclCall call = fake::call_of(made, "CommInitRankConfig");
  call.count = static_cast<size_t>(size);
  call.peer = rank;
  call.detail = fake::describe(config);
  call.nth = static_cast<uint64_t>(made.ordinal);
  const NcclFault* fault = fake::note(*state, call);
  if (fault != nullptr && fault->kind == NcclFault::Kind::kFails) {
    made.phase = ncclComm::Phase::kDestroyed;
    fake::tell(*state, fault->text);
    return fault->result;
  }
  *comm = &made;
  if (fault != nullptr && fault->kind == NcclFault::Kind::kFailsLater) {
    made.stuck = true;
    fake::fail(*state, made, fault->result, fault->text);
    return made.blocking ? fault->result : ncclInProgress;
  }
  made.stuck = fault != nullptr && (fault->kind == NcclFault::Kind::kNeverDone ||
                                    fault->kind == NcclFault::Kind::kBlocks);
  clique->members[static_cast<size_t>(rank)] = &made;
  return fake::result_of(*state, lock, made, fault);
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* made,
                           ncclConfig_t* config) {
  fake::FakeNccl::State* state = fake::active_state();
  if (state == nullptr) return ncclInternalError;
  auto lock = state->devices.lock();
  const ncclResult_t wrong = fake::check(*state, comm, "CommSplit");
  if (wrong != ncclSuccess) return wrong;
  if (!fake::is_valid(config)) return fake::misuse(*state, "ncclCommSplit: no valid config");
  NcclCall call = fake::call_of(*comm, "CommSplit");
  call.peer = color;
  call.count = static_cast<size_t>(key);
  call.detail = fake::describe(config);
  call.nth = comm->splits;
  const NcclFault* fault = fake::note(*state, call);
  if (fault != nullptr && fault->kind == NcclFault::Kind::kFails) {
    fake::fail(*state, *comm, fault->result, fault->text);
    return fault->result;
  }
  if (fault != nullptr && fault->kind == NcclFault::Kind::kFailsLater) {
    fake::fail(*state, *comm, fault->result, fault->text);
    return comm->blocking ? fault->result : ncclInProgress;
  }
  *made = nullptr;
  comm->made = made;
  comm->phase = ncclComm::Phase::kSplitting;
  if (!comm->blocking) comm->polls = state->polls;
  comm->stuck = fault != nullptr && (fault->kind == NcclFault::Kind::kNeverDone ||
                                     fault->kind == NcclFault::Kind::kBlocks);
  const uint64_t round = comm->splits++;
  if (!comm->stuck) {
    ncclComm* child = nullptr;
    if (color != NCCL_SPLIT_NOCOLOR) {
      child = &fake::make_comm(*state, comm->world_rank, config, comm->blocking);
      comm->children.push_back(child);
    }
    comm->clique->splits[round][comm->rank] = {color, key, child};
  }
  return fake::result_of(*state, lock, *comm, fault);
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  fake::FakeNccl::State* state = fake::active_state();
  if (state == nullptr) return ncclInternalError;
  auto lock = state->devices.lock();
  const ncclResult_t wrong = fake::check(*state, comm, "CommFinalize");
  if (wrong != ncclSuccess) return wrong;
  const NcclFault* fault = fake::note(*state, fake::call_of(*comm, "CommFinalize"));
  comm->phase = ncclComm::Phase::kFinalizing;
  comm->stuck = fault != nullptr && fault->kind == NcclFault::Kind::kNeverDone;
  if (!comm->blocking) comm->polls = state->polls;
  ++comm->clique->finalizing;
  return fake::result_of(*state, lock, *comm, fault);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  fake::FakeNccl::State* state = fake::active_state();
  if (state == nullptr) return ncclInternalError;
  const auto lock = state->devices.lock();
  if (!fake::is_living(*state, comm)) {
    return fake::misuse(*state, "ncclCommDestroy of what is no communicator (any more)");
  }
  fake::note(*state, fake::call_of(*comm, "CommDestroy"));
  const std::string what =
      fmt::format("rank {}'s communicator {}", comm->world_rank, comm->ordinal);
  if (!comm->launches.empty() || !comm->held.empty()) {
    fake::misuse(*state, what + " is destroyed while its operations are under way");
  }
  for (const ncclComm* child : comm->children) {
    if (!child->gone()) fake::misuse(*state, what + " is destroyed before its child");
  }
  if (!comm->registrations.empty()) {
    fake::misuse(*state, what + " is destroyed while memory is registered with it");
  }
  comm->phase = ncclComm::Phase::kDestroyed;
  fake::drop_launches(*state, *comm);
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  fake::FakeNccl::State* state = fake::active_state();
  if (state == nullptr) return ncclInternalError;
  const auto lock = state->devices.lock();
  if (!fake::is_living(*state, comm)) {
    return fake::misuse(*state, "ncclCommAbort of what is no communicator (any more)");
  }
  fake::note(*state, fake::call_of(*comm, "CommAbort"));
  if (comm->phase == ncclComm::Phase::kSplitting && comm->made != nullptr) {
    // Nobody got it.
    const auto round = comm->clique->splits.find(comm->splits - 1);
    if (round != comm->clique->splits.end() && round->second.contains(comm->rank)) {
      if (ncclComm* child = round->second[comm->rank].child)
        child->phase = ncclComm::Phase::kAborted;
    }
  }
  comm->phase = ncclComm::Phase::kAborted;
  // NCCL frees what belongs to a communicator along with it.
  comm->registrations.clear();
  comm->operators.clear();
  fake::drop_launches(*state, *comm);
  if (state->tells_of_aborts && comm->clique != nullptr) {
    for (ncclComm* member : comm->clique->members) {
      if (member != nullptr && !member->gone() && !member->launches.empty()) {
        fake::fail(*state, *member, ncclRemoteError,
                   fmt::format("rank {} has aborted the communicator", comm->rank));
      }
    }
  }
  state->changed.notify_all();
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  fake::FakeNccl::State* state = fake::active_state();
  if (state == nullptr) return ncclInternalError;
  const auto lock = state->devices.lock();
  if (!fake::is_living(*state, comm)) {
    return fake::misuse(*state, "ncclCommGetAsyncError of what is no communicator (any more)");
  }
  *error = fake::progress(*state, *comm);
  return ncclSuccess;
}

ncclResult_t ncclCommCount(ncclComm_t comm, int* size) {
  *size = static_cast<int>(comm->clique->members.size());
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank) {
  *rank = comm->rank;
  return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(ncclComm_t comm, int* device) {
  *device = comm->world_rank;
  return ncclSuccess;
}

ncclResult_t ncclMemAlloc(void** memory, size_t bytes) {
  fake::FakeNccl::State* state = fake::active_state();
  if (state == nullptr) return ncclInternalError;
  const auto lock = state->devices.lock();
  NcclCall call;
  call.rank = fake::current_device();
  call.function = "MemAlloc";
  call.count = bytes;
  call.nth = state->buffers_of_rank[call.rank]++;
  const NcclFault* fault = fake::note(*state, call);
  if (fault != nullptr) {
    fake::tell(*state, fault->text);
    return fault->result;
  }
  *memory = c10::alloc_cpu(std::max<size_t>(bytes, 1));
  std::memset(*memory, 0xff, bytes);
  state->buffers[*memory] = bytes;
  return ncclSuccess;
}

ncclResult_t ncclMemFree(void* memory) {
  fake::FakeNccl::State* state = fake::active_state();
  if (state == nullptr) return ncclInternalError;
  size_t bytes = 0;
  {
    const auto lock = state->devices.lock();
    NcclCall call;
    call.rank = fake::current_device();
    call.function = "MemFree";
    fake::note(*state, call);
    const auto buffer = state->buffers.find(memory);
    if (buffer == state->buffers.end()) {
      return fake::misuse(*state, "ncclMemFree of what is no memory of ncclMemAlloc (any more)");
    }
    for (const auto& comm : state->comms) {
      for (const auto& [handle, registered] : comm->registrations) {
        if (registered == memory) fake::misuse(*state, "ncclMemFree of memory that is registered");
      }
    }
    bytes = buffer->second;
    state->buffers.erase(buffer);
  }
  state->devices.free_after(memory, bytes, {});
  return ncclSuccess;
}

ncclResult_t ncclCommRegister(ncclComm_t comm, void* memory, size_t bytes, void** handle) {
  fake::FakeNccl::State* state = fake::active_state();
  if (state == nullptr) return ncclInternalError;
  const auto lock = state->devices.lock();
  const ncclResult_t wrong = fake::check(*state, comm, "CommRegister");
  if (wrong != ncclSuccess) return wrong;
  NcclCall call = fake::call_of(*comm, "CommRegister");
  call.count = bytes;
  if (const NcclFault* fault = fake::note(*state, call); fault != nullptr) {
    fake::tell(*state, fault->text);
    return fault->result;
  }
  *handle = reinterpret_cast<void*>(++state->ids);
  comm->registrations[*handle] = memory;
  return ncclSuccess;
}

ncclResult_t ncclCommDeregister(ncclComm_t comm, void* handle) {
  fake::FakeNccl::State* state = fake::active_state();
  if (state == nullptr) return ncclInternalError;
  const auto lock = state->devices.lock();
  if (!fake::is_living(*state, comm)) {
    return fake::misuse(*state, "ncclCommDeregister on what is no communicator (any more)");
  }
  fake::note(*state, fake::call_of(*comm, "CommDeregister"));
  if (comm->registrations.erase(handle) == 0) {
    return fake::misuse(*state, "ncclCommDeregister of what is not registered");
  }
  return ncclSuccess;
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* factor, ncclDataType_t dtype,
                                      ncclScalarResidence_t residence, ncclComm_t comm) {
  fake::FakeNccl::State* state = fake::active_state();
  if (state == nullptr) return ncclInternalError;
  const auto lock = state->devices.lock();
  const ncclResult_t wrong = fake::check(*state, comm, "RedOpCreatePreMulSum");
  if (wrong != ncclSuccess) return wrong;
  if (residence != ncclScalarHostImmediate) {
    return fake::misuse(*state, "the fake takes a factor from the host only");
  }
  double value = 0;
  switch (dtype) {
    case ncclFloat16:
      value = static_cast<float>(*static_cast<const c10::Half*>(factor));
      break;
    case ncclBfloat16:
      value = static_cast<float>(*static_cast<const c10::BFloat16*>(factor));
      break;
    case ncclFloat32:
      value = *static_cast<const float*>(factor);
      break;
    case ncclFloat64:
      value = *static_cast<const double*>(factor);
      break;
    default:
      return fake::misuse(*state, "the fake multiplies floating-point dtypes only");
  }
  auto made = std::make_unique<fake::Reduction>(fake::Reduction{ncclNumOps, value});
  NcclCall call = fake::call_of(*comm, "RedOpCreatePreMulSum");
  call.dtype = dtype;
  call.detail = fmt::format("{} {}", fake::to_string(*made), fake::name_of(dtype));
  fake::note(*state, call);
  *op = static_cast<ncclRedOp_t>(ncclNumOps + static_cast<int>(comm->operators.size()));
  comm->operators.push_back(std::move(made));
  return ncclSuccess;
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  fake::FakeNccl::State* state = fake::active_state();
  if (state == nullptr) return ncclInternalError;
  const auto lock = state->devices.lock();
  const auto index = static_cast<size_t>(op - ncclNumOps);
  if (!fake::is_living(*state, comm) || op < ncclNumOps || index >= comm->operators.size() ||
      comm->operators[index] == nullptr) {
    return fake::misuse(*state, "ncclRedOpDestroy of what is no operator (any more)");
  }
  fake::note(*state, fake::call_of(*comm, "RedOpDestroy"));
  comm->operators[index] = nullptr;
  return ncclSuccess;
}

ncclResult_t ncclAllGather(const void* send, void* receive, size_t count, ncclDataType_t dtype,
                           ncclComm_t comm, cudaStream_t stream) {
  return fake::communicate("AllGather", send, receive, count, dtype, nullptr, -1, comm, stream);
}

ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t count, ncclDataType_t dtype,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return fake::communicate("ReduceScatter", send, receive, count, dtype, &op, -1, comm, stream);
}

ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t dtype,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return fake::communicate("AllReduce", send, receive, count, dtype, &op, -1, comm, stream);
}

ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t dtype,
                           int root, ncclComm_t comm, cudaStream_t stream) {
  return fake::communicate("Broadcast", send, receive, count, dtype, nullptr, root, comm, stream);
}

ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t dtype, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return fake::communicate("Send", send, nullptr, count, dtype, nullptr, peer, comm, stream);
}

ncclResult_t ncclRecv(void* receive, size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return fake::communicate("Recv", nullptr, receive, count, dtype, nullptr, peer, comm, stream);
}

ncclResult_t ncclGroupStart() {
  fake::CallGroup& group = fake::call_group();
  if (group.depth++ == 0) {
    ++group.number;
    group.error = ncclSuccess;
    group.launches.clear();
  }
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  fake::FakeNccl::State* state = fake::active_state();
  if (state == nullptr) return ncclInternalError;
  auto lock = state->devices.lock();
  fake::CallGroup& group = fake::call_group();
  if (group.depth == 0) return fake::misuse(*state, "ncclGroupEnd without ncclGroupStart");
  if (--group.depth > 0) return ncclSuccess;
  const auto launches = std::exchange(group.launches, {});
  if (group.error != ncclSuccess) return group.error;
  return fake::submit(*state, lock, launches, nullptr);
}
