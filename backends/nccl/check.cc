#include "backends/nccl/check.h"

#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>

#include "backends/nccl/call_record.h"

namespace ppfsdp::nccl {
namespace {

void copy(const Settings& settings, const at::Tensor& to, const at::Tensor& from,
          const NcclStream& stream) {
  if (settings.hooks.copy) return settings.hooks.copy(to, from, stream.stream());
  const c10::StreamGuard guard(stream.stream());
  to.copy_(from, /*non_blocking=*/true);
}

}  // namespace

Check::Check(Endpoint& endpoint, Handle& handle, const What& what, bool lists, NcclStream& stream)
    : group_(what.group), lists_(lists) {
  const Settings& settings = endpoint.settings;
  const int size = group_->size();
  const auto words = static_cast<int64_t>(lists ? comm::encoded_size(size) : record_words());
  const auto on_device = at::TensorOptions(at::kLong).device(settings.tensors);
  // A copy between the device and memory that may be paged out would block the host.
  const auto on_host = at::TensorOptions(at::kLong).pinned_memory(settings.tensors.is_cuda());
  mine_ = stream.empty({words}, on_device);
  all_ = stream.empty({size * words}, on_device);
  host_mine_ = at::empty({words}, on_host);
  host_all_ = at::empty({size * words}, on_host);
  if (lists) {
    comm::encode(what.call, size, host_mine_.mutable_data_ptr<int64_t>());
  } else {
    write_record(what.call, host_mine_.mutable_data_ptr<int64_t>());
  }
  copy(settings, mine_, host_mine_, stream);
  handle.call(
      [&](ncclComm_t comm) {
        return ncclAllGather(mine_.const_data_ptr(), all_.mutable_data_ptr(), words, ncclInt64,
                             comm, stream.native());
      },
      what);
  copy(settings, host_all_, all_, stream);
  done_ = stream.mark();
}

std::optional<std::string> Check::find_difference() const {
  const int64_t* calls = host_all_.const_data_ptr<int64_t>();
  return lists_ ? comm::find_difference(calls, group_->size(), group_->ranks)
                : find_record_difference(calls, group_->size(), group_->ranks);
}

}  // namespace ppfsdp::nccl
