#pragma once

#include <ATen/core/Tensor.h>

#include "src/optim/exact_sum.h"

namespace ppfsdp::optim {

/// Adds the sum over the elements x of `tensor` of |x|^p, p finite and not 0, to `sum`, exactly:
/// how elements are shared out over calls, ranks and threads, and their order, changes nothing.
///
/// The terms are exact for p = 1 and 2. Otherwise each is rounded to double, before and regardless
/// of the sum: for p = 3 it is (x * x) * |x|, one rounding for all dtypes but double; for other p
/// it is std::pow(|x|, p), whose bits are those of the C library. Infinities and NaN count as
/// ExactSum has it; so does the infinity that 0 has for p < 0.
///
/// A CPU tensor of float32, bfloat16, float16 or float64, in any memory format. Runs on LibTorch's
/// intra-op threads, with vectors of up to `most_lanes` doubles (2, 4 or 8) as the CPU has them.
void add_power_sum(const at::Tensor& tensor, double p, ExactSum& sum, int most_lanes = 8);

}  // namespace ppfsdp::optim
