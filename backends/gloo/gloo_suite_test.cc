// The communicator suite on Gloo, ranks as threads of this process.
#include "backends/gloo/testing/thread_world.h"
#include "src/comm/testing/communicator_suite.h"

namespace ppfsdp::comm::testing {
namespace {

const WorldRunner kGloo = {"Gloo", [](int n, const std::function<void(Runtime&)>& fn) {
                             gloo::GlooOptions options;
                             options.timeout = std::chrono::seconds(60);
                             gloo::testing::run_threads(n, options, fn);
                           }};

INSTANTIATE_TEST_SUITE_P(Gloo, CommunicatorSuite,
                         ::testing::ValuesIn(sizes(kGloo, {1, 2, 3, 4, 5, 6, 7, 8})),
                         suite_param_name);

}  // namespace
}  // namespace ppfsdp::comm::testing
