#pragma once

#include <optional>

#include "src/dtensor/rule.h"

namespace ppfsdp::dtensor {

/// An op that folds some dims of its first argument.
struct Reduction {
  /// The dims that are folded, not negative, ascending.
  std::vector<int64_t> dims;
  bool keepdim = false;
  /// What the results of the shards are to the whole; none: the folded dims have to be whole.
  std::optional<Placement> partial;
  /// Partial inputs that pass through: the fold of partial values is a partial value of the same
  /// kind.
  std::vector<Placement> passes;
  size_t results = 1;
};

/// The plan of `reduction`; `splits_folded` tells whether a folded dim is split in it.
Plan reduce(const Call& call, const Reduction& reduction, bool* splits_folded = nullptr);

/// The dims named by the argument `dim` (absent, None or empty: all) and by `keepdim`.
Reduction reduction_of(const Call& call);

/// What shards' norms of order p are to the whole's: Partial(norm p), max, min or sum.
Placement norm_partial(double order);

}  // namespace ppfsdp::dtensor
