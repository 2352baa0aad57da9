#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "src/comm/runtime.h"

namespace ppfsdp::comm::testing {

/// A way to run a function on every rank of a world, at once, within this process.
struct WorldRunner {
  /// For test names: letters and digits.
  std::string name;
  /// Runs `fn` on `n` ranks and returns when all have; throws what a rank throws.
  std::function<void(int n, const std::function<void(Runtime&)>& fn)> run;
  /// Whether reductions of more than one rank have the very bits of the order that the runtime
  /// names. Else they must be as near to them as the roundings of another order allow.
  bool exact = true;
};

struct SuiteParam {
  WorldRunner runner;
  int size = 1;
};

std::ostream& operator<<(std::ostream& out, const SuiteParam& param);
std::string suite_param_name(const ::testing::TestParamInfo<SuiteParam>& info);

/// What every backend must do, for one world size. A backend's test instantiates it:
///
///     INSTANTIATE_TEST_SUITE_P(Gloo, CommunicatorSuite,
///                              ::testing::ValuesIn(sizes(runner, {1, 2, 3})), suite_param_name);
class CommunicatorSuite : public ::testing::TestWithParam<SuiteParam> {
 protected:
  int size() const { return GetParam().size; }
  bool exact() const { return GetParam().runner.exact || size() == 1; }
  /// Runs `fn` on every rank of the world.
  void run(const std::function<void(Runtime&)>& fn) const { GetParam().runner.run(size(), fn); }
};

/// One parameter for each world size.
std::vector<SuiteParam> sizes(const WorldRunner& runner, const std::vector<int>& sizes);

}  // namespace ppfsdp::comm::testing
