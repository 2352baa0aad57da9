#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "backends/nccl/nccl.h"

namespace ppfsdp::nccl {
namespace {

/// Sets variables for the time of a test.
class Variables {
 public:
  explicit Variables(std::vector<std::pair<std::string, std::string>> variables)
      : variables_(std::move(variables)) {
    for (const auto& [name, value] : variables_) ::setenv(name.c_str(), value.c_str(), 1);
  }
  ~Variables() {
    for (const auto& [name, value] : variables_) ::unsetenv(name.c_str());
  }

 private:
  std::vector<std::pair<std::string, std::string>> variables_;
};

// Two ranks of one machine on one GPU, if LOCAL_RANK were not read.
TEST(Options, TheLaunchersLocalRankIsTheGpu) {
  const Variables variables({{"RANK", "5"},
                             {"WORLD_SIZE", "8"},
                             {"LOCAL_RANK", "1"},
                             {"LOCAL_WORLD_SIZE", "4"},
                             {"MASTER_ADDR", "node7"},
                             {"MASTER_PORT", "4321"}});
  const NcclOptions options = NcclOptions::from_environment();
  EXPECT_EQ(options.rank, 5);
  EXPECT_EQ(options.world_size, 8);
  EXPECT_EQ(options.local_rank, 1);
  EXPECT_EQ(options.master_addr, "node7");
  EXPECT_EQ(options.master_port, 4321);
}

}  // namespace
}  // namespace ppfsdp::nccl
