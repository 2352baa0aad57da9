// The communicator suite on the NCCL backend over the fake NCCL, ranks as threads of this process:
// once as fast as the fake goes, once with streams that go on as late as they may, and with every
// call compared between ranks or none. Sums fold in NCCL's ring order, of which the backend's
// avg and premul-sum have NCCL's rounding (comm::ReductionOrder::kNcclRing).
#include "backends/nccl/testing/thread_world.h"
#include "src/comm/testing/communicator_suite.h"

namespace ppfsdp::comm::testing {
namespace {

WorldRunner make_runner(const std::string& name, bool late, uint64_t seed, uint64_t checked,
                        int polls) {
  nccl::testing::ThreadWorldOptions options;
  options.settings.timeout = std::chrono::seconds(50);
  options.settings.checked = checked;
  options.settings.poll = std::chrono::milliseconds(20);
  options.devices.late = late;
  options.devices.seed = seed;
  options.polls = polls;
  return {name, [options](int n, const std::function<void(Runtime&)>& fn) {
            nccl::testing::run_threads(n, options,
                                       [&](nccl::NcclRuntime& runtime) { fn(runtime); });
          }};
}

INSTANTIATE_TEST_SUITE_P(Nccl, CommunicatorSuite,
                         ::testing::ValuesIn(sizes(make_runner("Nccl", false, 0, 256, 1),
                                                   {1, 2, 3, 4, 5, 7, 8})),
                         suite_param_name);
INSTANTIATE_TEST_SUITE_P(Late, CommunicatorSuite,
                         ::testing::ValuesIn(sizes(make_runner("Late", true, 0, 0, 3), {2, 3, 4})),
                         suite_param_name);
INSTANTIATE_TEST_SUITE_P(Seeded, CommunicatorSuite,
                         ::testing::ValuesIn(sizes(make_runner("Seeded", true, 7, 4, 0), {3, 4})),
                         suite_param_name);

}  // namespace
}  // namespace ppfsdp::comm::testing
