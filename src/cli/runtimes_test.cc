#include "src/cli/runtimes.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "src/train/config_error.h"

namespace ppfsdp::cli {
namespace {

class RuntimesTest : public testing::Test {
 protected:
  void TearDown() override {
    for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) unsetenv(name);
  }

  static void launched(const char* rank, const char* world_size) {
    setenv("RANK", rank, 1);
    setenv("WORLD_SIZE", world_size, 1);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    setenv("MASTER_PORT", "29500", 1);
  }

  static train::Config resolve(const std::vector<std::string>& overrides) {
    return resolve_backend(train::parse_config("", "", overrides));
  }

  static std::string resolve_error(const std::vector<std::string>& overrides) {
    try {
      resolve(overrides);
    } catch (const train::ConfigError& error) {
      return error.what();
    }
    return "";
  }
};

TEST_F(RuntimesTest, one_process_by_itself_is_the_simulated_mesh) {
  EXPECT_EQ(resolve({}).communication.backend, "sim");
  EXPECT_EQ(resolve({"parallelism.ranks=7"}).parallelism.ranks, 7);
  EXPECT_EQ(resolve({"communication.backend=single"}).parallelism.ranks, 1);
}

TEST_F(RuntimesTest, launched_process_is_gloos_with_the_launchers_world) {
  launched("1", "3");
  const train::Config config = resolve({});
  EXPECT_EQ(config.communication.backend, "gloo");
  EXPECT_EQ(config.parallelism.ranks, 3);
  EXPECT_EQ(resolve({"parallelism.ranks=3"}).parallelism.ranks, 3);
}

TEST_F(RuntimesTest, what_does_not_fit_the_launcher_is_refused) {
  launched("1", "3");
  EXPECT_EQ(
      resolve_error({"communication.backend=sim"}),
      "communication.backend = \"sim\" runs in one process, but a launcher started this one as "
      "rank 1 of 3; leave the backend out or set it to \"gloo\"");
  EXPECT_EQ(resolve_error({"parallelism.ranks=4"}),
            "parallelism.ranks = 4 does not fit communication.backend = \"gloo\", whose world here "
            "is 3");
  setenv("WORLD_SIZE", "x", 1);
  EXPECT_NE(resolve_error({}).find("WORLD_SIZE"), std::string::npos) << resolve_error({});
}

TEST_F(RuntimesTest, gloo_needs_a_launcher_and_one_device_is_one_rank) {
  const std::string error = resolve_error({"communication.backend=gloo"});
  EXPECT_NE(error.find("WORLD_SIZE"), std::string::npos) << error;
  EXPECT_NE(error.find("ppfsdp launch"), std::string::npos) << error;
  EXPECT_EQ(
      resolve_error({"communication.backend=single", "parallelism.ranks=2"}),
      "parallelism.ranks = 2 does not fit communication.backend = \"single\", whose world here "
      "is 1");
}

// Every option of the mesh must reach it.
TEST_F(RuntimesTest, runs_every_rank_with_the_options_given) {
  const train::Config config = resolve({"parallelism.ranks=3", "communication.sim_order=tree"});
  std::vector<int> ranks;
  run_ranks(config, [&](comm::Runtime& runtime) {
    ranks.push_back(runtime.rank());
    EXPECT_EQ(runtime.world_size(), 3);
    EXPECT_EQ(runtime.backend(), "sim");
    EXPECT_EQ(runtime.reduction_order(), comm::ReductionOrder::kTree);
  });
  EXPECT_EQ(ranks.size(), 3u);
  run_ranks(resolve({"communication.backend=single"}), [&](comm::Runtime& runtime) {
    EXPECT_EQ(runtime.world_size(), 1);
    EXPECT_EQ(runtime.backend(), "single");
  });
}

}  // namespace
}  // namespace ppfsdp::cli
