#include "src/cli/gpus.h"

#include <gtest/gtest.h>

namespace ppfsdp::cli {
namespace {

// A rank on another's GPU fails in NCCL, and one that asks for a GPU that it can't see fails too.
TEST(GpusTest, each_local_rank_has_its_own_gpu) {
  const start::Launched torchrun = {.launcher = "torchrun", .local_rank = 3, .local_world_size = 4};
  EXPECT_EQ(device_of(torchrun, 4), 3);
  EXPECT_EQ(device_of(torchrun, 1), 3) << "which is said to be missing";
  const start::Launched task = {.launcher = "Slurm", .local_rank = 3, .local_world_size = 4};
  EXPECT_EQ(device_of(task, 4), 3);
  EXPECT_EQ(device_of(task, 1), 0) << "the one that srun gave this task";
}

TEST(GpusTest, are_counted_in_any_build) { EXPECT_GE(count_gpus(), 0); }

}  // namespace
}  // namespace ppfsdp::cli
