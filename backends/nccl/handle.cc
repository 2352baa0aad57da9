#include "backends/nccl/handle.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <thread>
#include <utility>

#include "src/comm/communicator.h"
#include "src/comm/text.h"

namespace ppfsdp::nccl {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr const char* kUniqueId = "ppfsdp/nccl/unique_id";

/// Set by the last rank whose communicator is there.
constexpr const char* kAllStarted = "ppfsdp/nccl/all_started";
constexpr const char* kStarted = "ppfsdp/nccl/started";

std::string here_key(int rank) { return fmt::format("ppfsdp/nccl/here/{}", rank); }
std::string started_key(int rank) { return fmt::format("ppfsdp/nccl/started/{}", rank); }

/// Between two questions whether NCCL is through: usually it is within microseconds.
void pause(steady_clock::time_point begin) {
  if (steady_clock::now() - begin < microseconds(500)) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(microseconds(100));
  }
}

ncclConfig_t make_config(const Group& group) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  config.commName = group.name.c_str();
  return config;
}

std::string found_no_end(const Endpoint& endpoint) {
  return fmt::format("was not done within {}", comm::seconds(endpoint.settings.timeout));
}

/// The ranks that have not come to start NCCL, or if all have, those that are not through with it.
std::string who_is_missing(const Endpoint& endpoint, const Group& group) {
  std::vector<int> absent, busy;
  for (const int rank : group.ranks) {
    if (!endpoint.settings.store->check({here_key(rank)})) absent.push_back(rank);
    if (!endpoint.settings.store->check({started_key(rank)})) busy.push_back(rank);
  }
  if (!absent.empty()) return name_ranks(absent) + " had not come";
  if (busy.empty()) return "all ranks had come";
  return fmt::format("all ranks had come; {} {} not through", name_ranks(busy),
                     busy.size() == 1 ? "was" : "were");
}

}  // namespace

std::shared_ptr<Handle> Handle::join_world(const std::shared_ptr<Endpoint>& endpoint,
                                           GroupPtr group) {
  c10d::Store& store = *endpoint->settings.store;
  const auto fail = [&](const std::string& why) {
    endpoint->fail(fmt::format("starting NCCL for the world of {} ranks: {}; this is rank {}",
                               group->size(), why, group->rank()));
    endpoint->check_alive();
  };
  store.set(here_key(group->rank()), std::vector<uint8_t>{1});
  ncclUniqueId id{};
  if (group->rank() == 0) {
    const ncclResult_t result = ncclGetUniqueId(&id);
    if (result != ncclSuccess) {
      fail(fmt::format("ncclGetUniqueId: {} ({})", ncclGetErrorString(result),
                       comm::first_line(ncclGetLastError(nullptr))));
    }
    const auto* bytes = reinterpret_cast<const uint8_t*>(id.internal);
    store.set(kUniqueId, std::vector<uint8_t>(bytes, bytes + sizeof(id.internal)));
  } else {
    if (!endpoint->wait_for_key(kUniqueId)) {
      fail(fmt::format("rank 0 made no unique id within {}; {}",
                       comm::seconds(endpoint->settings.timeout),
                       who_is_missing(*endpoint, *group)));
    }
    const std::vector<uint8_t> bytes = store.get(kUniqueId);
    std::memcpy(id.internal, bytes.data(), std::min(bytes.size(), sizeof(id.internal)));
  }

  const auto handle = std::make_shared<Handle>(endpoint, group);
  endpoint->add(handle);
  ncclConfig_t config = make_config(*group);
  ncclResult_t result;
  {
    const auto lock = handle->acquire();
    handle->check_open();
    result = ncclCommInitRankConfig(&handle->comm_, group->size(), id, group->index, &config);
  }
  if (result == ncclInProgress) result = handle->settle();
  if (result == ncclInProgress) {
    fail(fmt::format("{}; {}", found_no_end(*endpoint), who_is_missing(*endpoint, *group)));
  }
  if (result != ncclSuccess) fail(handle->error_text(result));
  // One rank's NCCL may be through while another's is not. Nobody begins before all can.
  store.set(started_key(group->rank()), std::vector<uint8_t>{1});
  if (store.add(kStarted, 1) == group->size()) store.set(kAllStarted, std::vector<uint8_t>{1});
  if (!endpoint->wait_for_key(kAllStarted)) {
    fail(fmt::format("{}; {}", found_no_end(*endpoint), who_is_missing(*endpoint, *group)));
  }
  return handle;
}

std::shared_ptr<Handle> Handle::split(GroupPtr group, int color, const What& what) {
  const auto part = std::make_shared<Handle>(endpoint_, group);
  endpoint_->add(part);
  ncclConfig_t config = make_config(*group);
  call(
      [&](ncclComm_t comm) {
        return ncclCommSplit(comm, color, group_->index, &part->made_, &config);
      },
      what);
  {
    const auto lock = part->acquire();
    part->check_open();
    part->comm_ = std::exchange(part->made_, nullptr);
    if (part->comm_ == nullptr) endpoint_->raise(what, "NCCL made no communicator");
  }
  const ncclResult_t result = part->settle();
  if (result == ncclInProgress) endpoint_->raise_asking(what, found_no_end(*endpoint_));
  if (result != ncclSuccess) endpoint_->raise_asking(what, part->error_text(result));
  return part;
}

std::unique_lock<std::mutex> Handle::acquire() {
  std::unique_lock lock(mutex_, std::try_to_lock);
  for (const auto begin = steady_clock::now(); !lock.owns_lock(); lock.try_lock()) {
    endpoint_->check_alive();
    pause(begin);
  }
  return lock;
}

void Handle::check_open() const {
  endpoint_->check_alive();
  if (closed_) {
    throw comm::CommError(
        fmt::format("group '{}' is used after the end of the runtime that made it; this is rank {}",
                    group_->name, group_->rank()));
  }
}

std::string Handle::error_text(ncclResult_t result) {
  const auto lock = acquire();
  // Known even when there is no communicator.
  const std::string last = comm::first_line(ncclGetLastError(comm_));
  return fmt::format("NCCL says: {}{}", ncclGetErrorString(result),
                     last.empty() ? "" : fmt::format(" ({})", last));
}

ncclResult_t Handle::settle() {
  const Endpoint::Waits waits(*endpoint_);
  const auto begin = steady_clock::now();
  const auto deadline = begin + endpoint_->settings.timeout;
  for (;;) {
    {
      const auto lock = acquire();
      check_open();
      ncclResult_t state = ncclSuccess;
      const ncclResult_t result = ncclCommGetAsyncError(comm_, &state);
      if (result != ncclSuccess) return result;
      if (state != ncclInProgress) return state;
    }
    if (steady_clock::now() > deadline) return ncclInProgress;
    pause(begin);
  }
}

ncclResult_t Handle::try_call(c10::function_ref<ncclResult_t(ncclComm_t)> work) {
  ncclResult_t result;
  {
    const auto lock = acquire();
    check_open();
    result = work(comm_);
  }
  return result == ncclInProgress ? settle() : result;
}

void Handle::call(c10::function_ref<ncclResult_t(ncclComm_t)> work, const What& what) {
  const ncclResult_t result = try_call(work);
  if (result == ncclSuccess) return;
  if (result == ncclInProgress) endpoint_->raise_asking(what, found_no_end(*endpoint_));
  endpoint_->raise_asking(what, error_text(result));
}

std::string Handle::find_error() {
  ncclResult_t state = ncclSuccess;
  {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock() || comm_ == nullptr || closed_) return "";
    const ncclResult_t result = ncclCommGetAsyncError(comm_, &state);
    if (result != ncclSuccess) state = result;
  }
  return state == ncclSuccess || state == ncclInProgress ? "" : error_text(state);
}

void Handle::abort(const std::vector<std::shared_ptr<Handle>>& handles) {
  const auto deadline = steady_clock::now() + std::chrono::seconds(1);
  std::vector<std::unique_lock<std::mutex>> locks;
  for (const auto& handle : handles) {
    std::unique_lock lock(handle->mutex_, std::try_to_lock);
    while (!lock.owns_lock() && steady_clock::now() < deadline) {
      std::this_thread::sleep_for(milliseconds(1));
      lock.try_lock();
    }
    locks.push_back(std::move(lock));
  }
  ncclGroupStart();
  // In the order of creation: what a split was about to make is known once its source is aborted.
  for (const auto& handle : handles) {
    handle->closed_ = true;
    ncclComm_t comm = std::exchange(handle->comm_, nullptr);
    if (comm == nullptr) comm = std::exchange(handle->made_, nullptr);
    // Its result would change nothing: the rank has failed.
    if (comm != nullptr) ncclCommAbort(comm);
  }
  ncclGroupEnd();
}

void Handle::finalize(const std::vector<std::shared_ptr<Handle>>& handles,
                      steady_clock::time_point deadline) {
  // All are asked before any is waited for: ranks may have made their groups in different orders.
  std::vector<std::shared_ptr<Handle>> open;
  for (const auto& handle : handles) {
    const auto lock = handle->acquire();
    if (handle->comm_ == nullptr) continue;
    ncclCommFinalize(handle->comm_);
    open.push_back(handle);
  }
  const auto begin = steady_clock::now();
  std::vector<std::shared_ptr<Handle>> stuck;
  for (const auto& handle : open) {
    for (;;) {
      {
        const auto lock = handle->acquire();
        // The watchdog may have aborted it meanwhile.
        if (handle->comm_ == nullptr) break;
        ncclResult_t state = ncclSuccess;
        const ncclResult_t result = ncclCommGetAsyncError(handle->comm_, &state);
        if (result == ncclSuccess && state == ncclSuccess) {
          handle->closed_ = true;
          ncclCommDestroy(std::exchange(handle->comm_, nullptr));
          break;
        }
        if (result != ncclSuccess || state != ncclInProgress || steady_clock::now() > deadline) {
          stuck.push_back(handle);
          break;
        }
      }
      pause(begin);
    }
  }
  if (!stuck.empty()) abort(stuck);
}

}  // namespace ppfsdp::nccl
