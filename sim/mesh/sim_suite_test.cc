// The communicator suite on the simulated mesh: every reduction order in turn, random schedules.
#include "sim/mesh/world.h"
#include "src/comm/testing/communicator_suite.h"

namespace ppfsdp::comm::testing {
namespace {

WorldRunner make_runner(std::string name, ReductionOrder order, sim::Schedule schedule,
                        uint64_t seed) {
  return {std::move(name), [=](int n, const std::function<void(Runtime&)>& fn) {
            sim::WorldOptions options;
            options.seed = seed;
            options.schedule = schedule;
            options.order = order;
            sim::run_world(n, options, fn);
          }};
}

INSTANTIATE_TEST_SUITE_P(GlooRing, CommunicatorSuite,
                         ::testing::ValuesIn(sizes(make_runner("SimGlooRing",
                                                               ReductionOrder::kGlooRing,
                                                               sim::Schedule::kRoundRobin, 0),
                                                   {1, 2, 3, 4, 5, 6, 7, 8})),
                         suite_param_name);
INSTANTIATE_TEST_SUITE_P(RankOrder, CommunicatorSuite,
                         ::testing::ValuesIn(sizes(make_runner("SimRankOrder",
                                                               ReductionOrder::kRankOrder,
                                                               sim::Schedule::kRandom, 1),
                                                   {3, 8})),
                         suite_param_name);
INSTANTIATE_TEST_SUITE_P(NcclRing, CommunicatorSuite,
                         ::testing::ValuesIn(sizes(make_runner("SimNcclRing",
                                                               ReductionOrder::kNcclRing,
                                                               sim::Schedule::kRandom, 2),
                                                   {4, 5})),
                         suite_param_name);
INSTANTIATE_TEST_SUITE_P(Tree, CommunicatorSuite,
                         ::testing::ValuesIn(sizes(make_runner("SimTree", ReductionOrder::kTree,
                                                               sim::Schedule::kRandom, 3),
                                                   {6, 7})),
                         suite_param_name);

}  // namespace
}  // namespace ppfsdp::comm::testing
