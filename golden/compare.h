#pragma once

#include <string>

#include "golden/case.h"

namespace ppfsdp::golden {

/// How far a run is from a recorded one.
struct Difference {
  bool bitwise = true;       ///< every loss, norm, gradient and parameter has the same bits
  double loss_rel = 0;       ///< largest |a - b| / |b| over steps and ranks
  double grad_norm_rel = 0;  ///< over steps
  double grad_abs = 0;       ///< over the elements of all recorded gradients
  double grad_scale = 0;     ///< largest recorded |gradient|
  double param_abs = 0;      ///< over the elements of all final parameters
  double param_rms = 0;      ///< root mean square of the same
  /// The first thing that differs ("step 0, rank 1: loss 4.9 instead of 4.8"); empty if none does.
  std::string first;
};

/// A NaN against a number counts as an infinite difference. Throws when one of them lacks a tensor
/// that the other has.
Difference compare(const Outputs& run, const Outputs& recorded);

/// How far two runs may be from each other that do the same operations and add in other orders
/// (another machine's kernels, another fold).
///
/// Let u be the unit roundoff of float32, n the terms of the longest sum in a product, d the depth
/// of the chain of products (9 a block, forward and backward). Errors that are independent and
/// without bias add up as a random walk, so in float32 the gradients of two such runs differ by
/// sqrt(d n) u, relative to their size. In a 16-bit dtype of roundoff v, products still add in
/// float32 and round once: results differ only where the rounding falls to the other side, a share
/// sqrt(n) u / v of them, by 2 v, which is 2 sqrt(d sqrt(n) u v) in root mean square. A fold of w
/// ranks in a dtype of roundoff r adds sqrt(w) r. Let e be 4 times the sum, four standard
/// deviations.
///
/// A step of AdamW is normalised: elements within e of zero (a share of about e) may turn round and
/// move by 2 lr, others x above it by about lr e / x, so an update differs by lr sqrt(8 e) in root
/// mean square, and by 2 lr at most. The loss is stationary to first order in those elements, so it
/// moves by a share of 8 e of what a step does. SGD's parameters differ by lr / (1 - momentum)
/// times the gradient's error. All add up over the steps.
struct Tolerance {
  double loss_rel;
  double grad_norm_rel;
  double grad_abs;
  double param_abs;
  double param_rms;
};
Tolerance tolerance(const Case& config, const Difference& difference);

/// Whether each difference is within its tolerance.
bool within(const Difference& difference, const Tolerance& tolerance);

}  // namespace ppfsdp::golden
