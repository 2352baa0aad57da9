#include "src/cli/runtimes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "src/train/config_error.h"
#include "src/train/test_util.h"

namespace ppfsdp::cli {
namespace {

using Overrides = std::vector<std::string>;
using Reason = std::optional<std::string>;

const Reason kNoGpu = "no GPU is visible";

start::Launched rank_of(int rank, int world_size) {
  return {.launcher = "torchrun", .rank = rank, .world_size = world_size};
}

RunPlan resolve(const Overrides& overrides, const std::optional<start::Launched>& launched = {},
                const Reason& no_nccl = kNoGpu) {
  return resolve_backend(train::parse_config("", "", overrides), launched, [&] { return no_nccl; });
}

std::string resolve_error(const Overrides& overrides,
                          const std::optional<start::Launched>& launched = {}) {
  return train::message_of<train::ConfigError>([&] { resolve(overrides, launched); });
}

TEST(RuntimesTest, one_process_by_itself_is_the_simulated_mesh) {
  EXPECT_EQ(resolve({}).config.communication.backend, "sim");
  EXPECT_FALSE(resolve({}).one_process_a_rank());
  EXPECT_TRUE(resolve({}).leads());
  EXPECT_EQ(resolve({"parallelism.ranks=7"}).config.parallelism.ranks, 7);
  EXPECT_EQ(resolve({"communication.backend=single"}).config.parallelism.ranks, 1);
}

TEST(RuntimesTest, launched_process_has_the_launchers_world) {
  const RunPlan plan = resolve({}, rank_of(1, 3));
  EXPECT_EQ(plan.config.communication.backend, "gloo");
  EXPECT_EQ(plan.config.parallelism.ranks, 3);
  EXPECT_TRUE(plan.one_process_a_rank());
  EXPECT_FALSE(plan.leads());
  EXPECT_TRUE(resolve({}, rank_of(0, 3)).leads());
  EXPECT_EQ(resolve({"parallelism.ranks=3"}, rank_of(1, 3)).config.parallelism.ranks, 3);
}

// GPUs that lie idle because nobody said nccl would cost days.
TEST(RuntimesTest, nccl_is_the_default_where_it_can_run) {
  EXPECT_EQ(resolve({}, rank_of(1, 3), std::nullopt).config.communication.backend, "nccl");
  EXPECT_TRUE(resolve({}, rank_of(1, 3), std::nullopt).one_process_a_rank());
  EXPECT_EQ(resolve({"communication.backend=gloo"}, rank_of(1, 3), std::nullopt)
                .config.communication.backend,
            "gloo");
  EXPECT_EQ(
      resolve({"communication.backend=nccl"}, rank_of(1, 3), std::nullopt).config.parallelism.ranks,
      3);
  EXPECT_EQ(resolve({}, {}, std::nullopt).config.communication.backend, "sim")
      << "without a launcher nothing changes";
}

TEST(RuntimesTest, nccl_that_can_not_run_says_why) {
  for (const auto& launched : {std::optional<start::Launched>(), {rank_of(0, 2)}}) {
    EXPECT_EQ(resolve_error({"communication.backend=nccl"}, launched),
              "communication.backend = \"nccl\": no GPU is visible");
  }
}

TEST(RuntimesTest, what_does_not_fit_the_launcher_is_refused) {
  EXPECT_EQ(
      resolve_error({"communication.backend=sim"}, rank_of(1, 3)),
      "communication.backend = \"sim\" runs in one process, but a launcher (torchrun) started "
      "this one as rank 1 of 3; leave the backend out or set it to \"gloo\"");
  EXPECT_EQ(resolve_error({"parallelism.ranks=4"}, rank_of(1, 3)),
            "parallelism.ranks = 4 does not fit communication.backend = \"gloo\", whose world here "
            "is 3");
}

// srun -n1, or a launcher's world of one: nobody waits for this process.
TEST(RuntimesTest, a_world_of_one_may_run_any_backend) {
  const RunPlan sim = resolve({"communication.backend=sim"}, rank_of(0, 1));
  EXPECT_FALSE(sim.one_process_a_rank());
  EXPECT_EQ(sim.config.parallelism.ranks, 4);
  EXPECT_EQ(resolve({"communication.backend=single"}, rank_of(0, 1)).config.parallelism.ranks, 1);
  EXPECT_EQ(resolve({}, rank_of(0, 1)).config.communication.backend, "gloo");
}

TEST(RuntimesTest, gloo_needs_a_launcher_and_one_device_is_one_rank) {
  EXPECT_EQ(
      resolve_error({"communication.backend=gloo"}),
      "communication.backend = \"gloo\" takes a process for each rank, and no launcher started "
      "this one: WORLD_SIZE is not set; start it as in ppfsdp launch -n 2 -- train, or with "
      "torchrun or srun");
  EXPECT_EQ(
      resolve_error({"communication.backend=single", "parallelism.ranks=2"}),
      "parallelism.ranks = 2 does not fit communication.backend = \"single\", whose world here "
      "is 1");
}

TEST(RuntimesTest, faults_of_the_launchers_variables_are_the_users) {
  setenv("RANK", "3", 1);
  setenv("WORLD_SIZE", "x", 1);
  EXPECT_EQ(train::message_of<train::ConfigError>([] { launched_process(); }),
            "environment variable WORLD_SIZE must be an integer in [1, 65536] (the number of "
            "ranks), got 'x'");
  unsetenv("RANK");
  unsetenv("WORLD_SIZE");
  EXPECT_EQ(launched_process(), std::nullopt);
}

// A key that ranks may differ in without a word would train something else on each.
TEST(RuntimesTest, ranks_must_agree_in_all_keys_but_the_metrics) {
  const train::Config config;
  const std::vector<start::Fact> facts = facts_of(config);
  ASSERT_FALSE(facts.empty());
  EXPECT_EQ(facts[0].name, "the build of this program");
  const auto differs = [&](const Overrides& overrides) {
    return facts_of(train::parse_config("", "", overrides).config) != facts;
  };
  EXPECT_TRUE(differs({"training.seed=1"}));
  EXPECT_TRUE(differs({"model.dim=16"}));
  EXPECT_TRUE(differs({"communication.backend=nccl"}));
  EXPECT_TRUE(differs({"data.files=a"}));
  EXPECT_FALSE(differs({"metrics.jsonl=a", "metrics.progress=false"}));
}

// Every option of the mesh must reach it.
TEST(RuntimesTest, runs_every_rank_with_the_options_given) {
  const RunPlan plan = resolve({"parallelism.ranks=3", "communication.sim_order=tree"});
  std::vector<int> ranks;
  run_ranks(plan, [&](comm::Runtime& runtime) {
    ranks.push_back(runtime.rank());
    EXPECT_EQ(runtime.world_size(), 3);
    EXPECT_EQ(runtime.backend(), "sim");
    EXPECT_EQ(runtime.reduction_order(), comm::ReductionOrder::kTree);
  });
  std::ranges::sort(ranks);
  EXPECT_EQ(ranks, (std::vector<int>{0, 1, 2}));
  run_ranks(resolve({"communication.backend=single"}), [&](comm::Runtime& runtime) {
    EXPECT_EQ(runtime.world_size(), 1);
    EXPECT_EQ(runtime.backend(), "single");
  });
}

}  // namespace
}  // namespace ppfsdp::cli
