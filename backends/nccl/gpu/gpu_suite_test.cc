// What every backend must do, by NCCL.
#include "backends/nccl/gpu/testing.h"
#include "src/comm/testing/communicator_suite.h"

namespace ppfsdp::comm::testing {
namespace {

// NCCL chooses where it begins to add, so only a world of one folds in a known order.
const WorldRunner kNccl = {
    .name = "Nccl",
    .run = [](int n, const std::function<void(Runtime&)>& fn) { nccl::testing::run_gpus(n, fn); },
    .exact = false};

INSTANTIATE_TEST_SUITE_P(Gpu, CommunicatorSuite,
                         ::testing::ValuesIn(sizes(kNccl, nccl::testing::world_sizes())),
                         suite_param_name);

}  // namespace
}  // namespace ppfsdp::comm::testing
