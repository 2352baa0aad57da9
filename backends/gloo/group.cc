#include "backends/gloo/group.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "src/comm/communicator.h"

namespace ppfsdp::gloo {

at::Tensor ScratchPool::take(int64_t bytes) {
  const auto smallest =
      std::min_element(free_.begin(), free_.end(), [&](const at::Tensor& a, const at::Tensor& b) {
        // Those that are large enough come first, the smallest of them before the others.
        return std::pair(a.numel() < bytes, a.numel()) < std::pair(b.numel() < bytes, b.numel());
      });
  if (smallest == free_.end()) return at::empty({bytes}, at::kByte);
  at::Tensor scratch = std::move(*smallest);
  free_.erase(smallest);
  // One that is too small makes room for a larger one, so that the pool does not only grow.
  if (scratch.numel() < bytes) scratch = at::empty({bytes}, at::kByte);
  return scratch;
}

Endpoint::Endpoint(const GlooOptions& options) : options(options) {
  if (options.world_size > 1) transport = std::make_unique<Transport>(options);
}

void Endpoint::check_alive() const {
  if (!failed_) return;
  const std::lock_guard lock(mutex_);
  throw comm::CommError("communication of this rank ended with an earlier failure: " + failure_);
}

void Endpoint::fail(const std::string& message) {
  const std::lock_guard lock(mutex_);
  if (!failed_) failure_ = message;
  failed_ = true;
}

}  // namespace ppfsdp::gloo
