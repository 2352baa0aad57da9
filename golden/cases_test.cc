// Each recorded case, by one process and by fully_shard on the simulated mesh.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "golden/case.h"
#include "golden/compare.h"
#include "golden/fingerprint.h"
#include "golden/train.h"
#include "sim/mesh/world.h"

namespace ppfsdp::golden {
namespace {

std::vector<std::filesystem::path> all_cases() {
  std::vector<std::filesystem::path> result;
  for (const auto& entry : std::filesystem::directory_iterator("golden/cases")) {
    if (entry.path().extension() == ".json") result.push_back(entry.path());
  }
  std::ranges::sort(result);
  return result;
}

/// What every rank returned.
std::vector<Outputs> on_simulated_mesh(const Recording& recording,
                                       const sim::WorldOptions& options) {
  std::vector<Outputs> by_rank(recording.config.world);
  sim::run_world(static_cast<int>(recording.config.world), options, [&](comm::Runtime& runtime) {
    by_rank[runtime.rank()] = train_sharded(recording.config, recording.inputs, runtime);
  });
  return by_rank;
}

class RecordedCase : public ::testing::TestWithParam<std::filesystem::path> {
 protected:
  void SetUp() override { at::set_num_threads(1); }
  const Recording recording_ = read_recording(GetParam());
};

TEST_P(RecordedCase, IsRepeatedByOneProcess) {
  const Difference difference =
      compare(train_single(recording_.config, recording_.inputs, comm::ReductionOrder::kGlooRing),
              recording_.outputs);
  if (kernel_fingerprint() == recording_.kernels) {
    EXPECT_TRUE(difference.bitwise) << difference.first;
  } else {
    EXPECT_TRUE(within(difference, tolerance(recording_.config, difference))) << difference.first;
  }
}

TEST_P(RecordedCase, IsTheSameShardedInEveryOrderAndSchedule) {
  // Whatever kernels this machine has: sharded training is one process's bit for bit, on every
  // rank.
  for (const auto order : {comm::ReductionOrder::kGlooRing, comm::ReductionOrder::kRankOrder,
                           comm::ReductionOrder::kNcclRing, comm::ReductionOrder::kTree}) {
    const Outputs single = train_single(recording_.config, recording_.inputs, order);
    for (const uint64_t seed : {0, 1, 2}) {
      const sim::WorldOptions options{
          .seed = seed,
          .schedule = seed == 0 ? sim::Schedule::kRoundRobin : sim::Schedule::kRandom,
          .order = order};
      for (const Outputs& outputs : on_simulated_mesh(recording_, options)) {
        const Difference difference = compare(outputs, single);
        EXPECT_TRUE(difference.bitwise)
            << comm::to_string(order) << ", seed " << seed << ": " << difference.first;
      }
    }
  }
}

TEST_P(RecordedCase, ShowsAWrongRun) {
  // The comparison must be able to fail: another learning rate is beyond the tolerance.
  Case wrong = recording_.config;
  wrong.lr *= 2;
  const Difference difference = compare(
      train_single(wrong, recording_.inputs, comm::ReductionOrder::kGlooRing), recording_.outputs);
  EXPECT_FALSE(within(difference, tolerance(recording_.config, difference)));
}

INSTANTIATE_TEST_SUITE_P(Golden, RecordedCase, ::testing::ValuesIn(all_cases()),
                         [](const auto& info) { return info.param.stem().string(); });

TEST(RecordedCases, ThereAreSome) { EXPECT_GE(all_cases().size(), 6u); }

}  // namespace
}  // namespace ppfsdp::golden
