#include "src/train/expectation_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "src/train/compare.h"

namespace ppfsdp::train {

void DifferenceReport::number(const std::string& what, double got, double expected,
                              double allowed) const {
  const bool both_nan = std::isnan(got) && std::isnan(expected);
  // Infinities of one sign are equal, though their difference is NaN.
  const bool equal = both_nan || got == expected || std::abs(got - expected) <= allowed;
  if (equal) return;
  std::string sentence = fmt::format("{} is {} sharded, {} on one device", what, got, expected);
  if (allowed > 0)
    sentence += fmt::format(" ({:.2g} apart, {:.2g} allowed)", std::abs(got - expected), allowed);
  note(sentence);
}

void DifferenceReport::tensor(const std::string& what, size_t index, const at::Tensor& got,
                              const at::Tensor& expected, uint64_t& max_ulps,
                              double& max_abs) const {
  const TensorDifference difference = compare_bits(got, expected);
  max_ulps = std::max(max_ulps, difference.max_ulps);
  max_abs = std::max(max_abs, difference.max_abs);
  if (!difference.first) return;
  const auto value = [&](const at::Tensor& tensor) {
    return tensor.flatten()[*difference.first].item<float>();
  };
  note(fmt::format("{} {} on rank {} is {} sharded, {} on one device at {} ({} ulps at most)", what,
                   compared_.names.at(index),
                   rank_of_element(compared_.sharded.at(index), *difference.first), value(got),
                   value(expected), coordinates(got.sizes(), *difference.first),
                   difference.max_ulps));
}

void DifferenceReport::note(const std::string& sentence) const {
  if (first_.empty()) first_ = fmt::format("step {}: {}", step_ + 1, sentence);
}

}  // namespace ppfsdp::train
