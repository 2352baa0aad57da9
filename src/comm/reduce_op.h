#pragma once

#include <string>

namespace ppfsdp::comm {

/// How the values of the ranks become one.
struct ReduceOp {
  enum class Kind { kSum, kAvg, kPremulSum, kMin, kMax };

  Kind kind = Kind::kSum;
  /// kPremulSum: each rank's value is multiplied by this, in the tensor's dtype, before the sum.
  double factor = 1.0;

  static ReduceOp sum() { return {Kind::kSum, 1.0}; }
  /// The sum in the tensor's dtype, then one division by the number of ranks; in NCCL's ring (see
  /// ReductionOrder) a product of each value first.
  static ReduceOp avg() { return {Kind::kAvg, 1.0}; }
  static ReduceOp premul_sum(double factor) { return {Kind::kPremulSum, factor}; }
  static ReduceOp min() { return {Kind::kMin, 1.0}; }
  static ReduceOp max() { return {Kind::kMax, 1.0}; }

  bool operator==(const ReduceOp&) const = default;
};

/// "sum", "avg", "premul_sum(0.5)", "min", "max".
std::string to_string(const ReduceOp& op);

}  // namespace ppfsdp::comm
