#pragma once

#include "src/dtensor/rule.h"

namespace ppfsdp::dtensor {

/// In which sense a pointwise op is linear, so that it may work on the ranks' partial sums.
enum class Linear {
  kNo,
  kUnary,     ///< f(a) = c a: a partial
  kSum,       ///< f(a, b) = c a + d b: all partial, a replicated one counted on one rank only
  kProduct,   ///< f(a, b) = a b: either partial, the other replicated
  kQuotient,  ///< f(a, b) = a / b: a partial, b replicated
};

/// The sizes that the operands (indices into call.operands()) broadcast to. Throws, naming all,
/// when they do not, and when an operand that is written would have to grow.
std::vector<int64_t> broadcast_sizes(const Call& call, c10::ArrayRef<size_t> operands);

/// How an elementwise op of these operands, broadcast to `sizes`, runs along mesh dim `mesh_dim`:
/// on whole tensors, on shards as any one of the operands is sharded, or on partial sums.
std::vector<Strategy> pointwise_strategies(const Call& call, c10::ArrayRef<size_t> operands,
                                           const std::vector<int64_t>& sizes, Linear linear,
                                           int64_t mesh_dim);

/// The rule of an elementwise op over all its tensor arguments.
Rule pointwise(Linear linear = Linear::kNo);

}  // namespace ppfsdp::dtensor
