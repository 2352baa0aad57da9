#pragma once

#include <memory>
#include <string>
#include <vector>

namespace ppfsdp::nccl {

/// A group of ranks, as this rank's operations and reports name it.
struct Group {
  std::string name;
  /// Equal on all members and on no other group: what keeps it apart in the store.
  std::string key;
  /// Ranks in the world.
  std::vector<int> ranks;
  /// This rank's index in `ranks`.
  int index = 0;

  int size() const { return static_cast<int>(ranks.size()); }
  /// This rank in the world.
  int rank() const { return ranks[index]; }
};

using GroupPtr = std::shared_ptr<const Group>;

}  // namespace ppfsdp::nccl
