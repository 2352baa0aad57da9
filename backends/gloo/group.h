#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "backends/gloo/streams.h"
#include "backends/gloo/transport.h"

namespace ppfsdp::gloo {

/// Memory for values on their way into a fold, kept for reuse: fresh memory of megabytes costs more
/// in page faults than the fold itself. Used on the rank's thread only.
class ScratchPool {
 public:
  /// At least `bytes` bytes, as a byte tensor.
  at::Tensor take(int64_t bytes);
  void give_back(at::Tensor scratch) { free_.push_back(std::move(scratch)); }

 private:
  std::vector<at::Tensor> free_;
};

/// What all groups of one rank share.
struct Endpoint {
  explicit Endpoint(const GlooOptions& options);

  /// Throws CommError with what failed first on this rank, if something did.
  void check_alive() const;
  /// Remembers the first failure. Any thread.
  void fail(const std::string& message);

  const GlooOptions options;
  /// For every transfer.
  std::chrono::milliseconds timeout = options.timeout;
  const std::shared_ptr<Progress> progress = std::make_shared<Progress>();
  ScratchPool scratch;
  /// Null in a world of one.
  std::unique_ptr<Transport> transport;

 private:
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;
  /// Guarded by mutex_.
  std::string failure_;
};

/// A group of ranks, as its operations see it. Groups share the connections of the world; `id`,
/// equal on all members, keeps their messages apart. So a group costs nothing.
struct Group {
  std::shared_ptr<Endpoint> endpoint;
  std::string name;
  /// Ranks in the world.
  std::vector<int> ranks;
  int rank = 0;
  uint64_t id = 0;
  int size() const { return static_cast<int>(ranks.size()); }
};

}  // namespace ppfsdp::gloo
