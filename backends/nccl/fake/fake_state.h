#pragma once

#include <nccl.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "backends/nccl/fake/fake_clique.h"
#include "backends/nccl/fake/fake_device.h"
#include "backends/nccl/fake/fake_nccl.h"

namespace ppfsdp::nccl::testing {

struct FakeNccl::State {
  FakeDevices& devices;
  const int polls;
  bool released = false;
  bool tells_of_aborts = false;
  /// Calls that have not returned because something is not done.
  int blocked = 0;
  std::condition_variable changed;
  std::vector<std::pair<Where, NcclFault>> faults;
  std::set<int> stopped;
  uint64_t ids = 0;
  std::map<uint64_t, std::shared_ptr<Clique>> cliques;
  /// Kept when destroyed, to know them again.
  std::vector<std::unique_ptr<ncclComm>> comms;
  std::map<int, int> comms_of_rank;
  std::map<void*, size_t> buffers;
  std::map<int, uint64_t> buffers_of_rank;
  std::vector<NcclCall> calls;
  std::vector<std::string> misuses;
  /// Everything that ncclGetLastError has given out; the last is the latest.
  std::list<std::string> texts{""};

  State(FakeDevices& devices, int polls) : devices(devices), polls(polls) {}
};

/// Of the FakeNccl that lives, or null.
FakeNccl::State* active_state();

/// The calling thread's group of calls.
struct CallGroup {
  int depth = 0;
  uint64_t number = 0;
  ncclResult_t error = ncclSuccess;
  std::vector<std::shared_ptr<Launch>> launches;
};
CallGroup& call_group();

// What the nccl functions are made of; all with the devices' lock held.

/// The text is what ncclGetLastError says.
void tell(FakeNccl::State& state, const std::string& text);
/// Notes what is not allowed; what the call then returns.
ncclResult_t misuse(FakeNccl::State& state, const std::string& text);
void fail(FakeNccl::State& state, ncclComm& comm, ncclResult_t result, const std::string& text);
/// Whether the communicator is one that is not destroyed.
bool is_living(const FakeNccl::State& state, ncclComm_t comm);
/// Whether a communicator can be given more; notes what is wrong if not.
ncclResult_t check(FakeNccl::State& state, ncclComm_t comm, const char* function);

NcclCall call_of(const ncclComm& comm, std::string function);
/// Notes the call; what befalls it, or null.
const NcclFault* note(FakeNccl::State& state, NcclCall call);

ncclComm& make_comm(FakeNccl::State& state, int world_rank, const ncclConfig_t* config,
                    bool blocking);
/// Lets time pass for what is in progress; what ncclCommGetAsyncError says.
ncclResult_t progress(FakeNccl::State& state, ncclComm& comm);
/// What a call returns that has begun something: at once, or when it is done.
ncclResult_t result_of(FakeNccl::State& state, std::unique_lock<std::mutex>& lock, ncclComm& comm,
                       const NcclFault* fault);
/// Puts launches in line, of which the caller has checked the communicators.
ncclResult_t submit(FakeNccl::State& state, std::unique_lock<std::mutex>& lock,
                    const std::vector<std::shared_ptr<Launch>>& launches, const NcclFault* fault);
/// Nothing that the communicator was given is done any more; its streams go on.
void drop_launches(FakeNccl::State& state, ncclComm& comm);

/// "sum", "premul(0.25)".
std::string to_string(const Reduction& reduction);

}  // namespace ppfsdp::nccl::testing
