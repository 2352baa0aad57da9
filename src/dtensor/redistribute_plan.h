#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

#include "src/dtensor/placement.h"

namespace ppfsdp::dtensor {

/// Mesh dim `mesh_dim` becomes `to`: Replicate, Partial, or Shard as the innermost split of its
/// dim.
struct Transition {
  int64_t mesh_dim = 0;
  Placement to;
};

struct RedistributionPlan {
  std::vector<Transition> transitions;
  int64_t bytes = 0;        ///< that a rank sends, the largest of all ranks
  int64_t collectives = 0;  ///< how many of the transitions communicate
};

/// A collective more is worth it where it spares this many bytes (what a link moves in the time
/// that a collective of few bytes takes).
inline constexpr int64_t kBytesOfACollective = 16384;

/// The transitions, one mesh dim each, that lead from placements `from` to `to` of a tensor of
/// global sizes `sizes` and `element_size` bytes an element and send the fewest bytes, each
/// collective counted as kBytesOfACollective more; the fewest transitions among equals. The same on
/// every rank. With n the ranks of the mesh dim and b the bytes of the local part (the largest of
/// all ranks) before the transition:
///
///   Replicate -> Shard, Replicate -> Partial, Shard -> Partial(sum)    nothing is sent
///   Partial -> Shard                  reduce-scatter                   (n-1)/n b
///   Partial -> Replicate              all-reduce                       2 (n-1)/n b
///   Shard(a) -> Shard(b)              all-to-all                       (n-1)/n b
///   Shard -> Replicate                all-gather                       (n-1) b
///
/// A split is undone only when it is its dim's innermost. Mesh dims of one rank take no part.
RedistributionPlan plan_redistribution(const std::vector<int64_t>& mesh_shape,
                                       c10::ArrayRef<int64_t> sizes, int64_t element_size,
                                       const Placements& from, const Placements& to);

}  // namespace ppfsdp::dtensor
