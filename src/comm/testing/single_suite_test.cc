// The communicator suite on a world of one without any backend.
#include "src/comm/single_runtime.h"
#include "src/comm/testing/communicator_suite.h"

namespace ppfsdp::comm::testing {
namespace {

const WorldRunner kSingle = {
    "Single", [](int, const std::function<void(Runtime&)>& fn) { fn(*make_single_runtime()); }};

INSTANTIATE_TEST_SUITE_P(Single, CommunicatorSuite, ::testing::ValuesIn(sizes(kSingle, {1})),
                         suite_param_name);

}  // namespace
}  // namespace ppfsdp::comm::testing
