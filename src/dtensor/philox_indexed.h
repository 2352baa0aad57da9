#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>

#include "src/dtensor/philox.h"
#include "src/dtensor/placement.h"

namespace ppfsdp::dtensor {

/// Fills a shard with its part of a random tensor whose element i, counted row-major in the whole
/// tensor, is a function of (seed, draw, i) alone: the same on every device, world size, mesh and
/// placement, and computed by each rank for its own elements only. `draw` numbers the random ops of
/// a program, so that each has values of its own.
///
/// `ranges[d]` is the part of dim d of `global_sizes` that `local` holds, as local_ranges gives it;
/// `local` has these lengths, any strides, any device (values are made on the host; on meta nothing
/// is done). Throws as check_distribution, and when the sizes do not fit each other.
///
/// The values. Philox's key is the seed, the counter's high half `draw` and its low half i / n,
/// where one block of four words serves n elements: 4, or 2 where a value needs 64 bits (dtype
/// Double, RandomInt, Random). With w the element's word (two words w, w' make w * 2^32 + w'), all
/// arithmetic in double without fused operations, rounded to float and then to the dtype:
///  - Uniform: from + (to - from) * u, u the word's leading 24 (Double: 53) bits as a fraction; a
///    value that rounds to `to` becomes `from`.
///  - Normal: Box-Muller on a pair of elements: r = sqrt(-2 ln(1 - u)), u the word of the first as
///  a
///    fraction of 32 (53) bits; r cos(2 pi v) the first's value, r sin(2 pi v) the second's, v the
///    second's word as a fraction; then mean + std * z.
///  - Bernoulli: w < p as fractions. Exponential: -ln(1 - u) / lambda.
///  - RandomInt, Random: from + w mod range.
/// Logarithm, sine and cosine are this file's own, of additions, multiplications, divisions and
/// square roots alone: no libm decides a bit.
void fill_indexed(const at::Tensor& local, c10::ArrayRef<int64_t> global_sizes,
                  c10::ArrayRef<ShardRange> ranges, const Distribution& distribution, uint64_t seed,
                  uint64_t draw);

/// The same for elements [first, first + count) of the whole tensor into the contiguous CPU tensor
/// `out` of `count` elements.
void fill_indexed_run(const at::Tensor& out, int64_t first, const Distribution& distribution,
                      uint64_t seed, uint64_t draw);

}  // namespace ppfsdp::dtensor
