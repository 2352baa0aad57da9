#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "src/train/expectation.h"

namespace ppfsdp::train {

/// Compares the things of one step in turn and keeps a sentence on the first that differs.
class DifferenceReport {
 public:
  /// `first` gets the sentence; the others outlive this.
  DifferenceReport(const ComparedParameters& compared, int64_t step, std::string& first)
      : compared_(compared), step_(step), first_(first) {}

  /// Two numbers, which may be `allowed` apart. NaN equals NaN alone.
  void number(const std::string& what, double got, double expected, double allowed = 0) const;

  /// Parameter number `index` or its gradient, which must have equal bits; raises `max_ulps` and
  /// `max_abs` to what they differ by.
  void tensor(const std::string& what, size_t index, const at::Tensor& got,
              const at::Tensor& expected, uint64_t& max_ulps, double& max_abs) const;

  /// Anything else: notes `sentence` ("step N: " is put before it).
  void note(const std::string& sentence) const;

 private:
  const ComparedParameters& compared_;
  int64_t step_;
  std::string& first_;
};

}  // namespace ppfsdp::train
