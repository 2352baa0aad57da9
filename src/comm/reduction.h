#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <string>

#include "src/comm/reduce_op.h"

namespace ppfsdp::comm {

/// The order in which a backend adds the ranks' values. Floating-point addition is not associative,
/// so this decides the bits of every reduction of more than two ranks.
enum class ReductionOrder {
  kRankOrder,  ///< ((x0 + x1) + x2) + ...
  kGlooRing,   ///< as Gloo's ring folds: chunks of the whole buffer, each starting at another rank
  /// A ring rotated by chunk = the slice of each rank, as NCCL's reduce-scatter. As in NCCL, avg
  /// multiplies each value by 1/n, in the dtype, before the sum.
  kNcclRing,
  kTree,  ///< pairwise by recursive halving: (x0 + x1) + (x2 + x3), ...
};

/// "rank_order", "gloo_ring", "nccl_ring", "tree".
std::string to_string(ReductionOrder order);
/// The reverse; an error that lists the names otherwise.
ReductionOrder parse_reduction_order(const std::string& name);

/// output[i - begin] = the reduction of inputs[r][i] over all ranks r for i in [begin, end), to the
/// bit as a collective over the whole of `inputs` gives it in this order: `inputs` are one
/// contiguous CPU tensor a rank, of equal numel and dtype. A reduce-scatter's rank takes its slice,
/// an all-reduce takes everything. Rounded to the dtype after every addition; avg divides once at
/// the end, but for kNcclRing. `output` may be a slice of an input that no later element needs (in
/// place).
void reduce_range(ReductionOrder order, const ReduceOp& op, c10::ArrayRef<at::Tensor> inputs,
                  int64_t begin, int64_t end, const at::Tensor& output);

/// As reduce_range for elements [begin, begin + output.numel()) of a buffer of `total` elements a
/// rank, given those elements alone: slices[r] holds rank r's, and has the numel of `output`. For a
/// backend that moves between ranks only what each of them needs.
void reduce_slices(ReductionOrder order, const ReduceOp& op, c10::ArrayRef<at::Tensor> slices,
                   int64_t total, int64_t begin, const at::Tensor& output);

}  // namespace ppfsdp::comm
