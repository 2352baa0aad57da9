// What the parts of a simulated world rely on: its groups and queues, who may call, what is
// poisoned when, and that nothing keeps a world alive. Deadlocks and errors of ranks: world_test.
#include "sim/mesh/world_state.h"

#include <ATen/ops/full.h>
#include <ATen/ops/isnan.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace ppfsdp::sim {
namespace {

std::string refused(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "(accepted)";
}

/// An all-gather of one element a rank that rank 0's side stream has reached and rank 1 has not.
struct Gather {
  explicit Gather(World& world)
      : operation(std::make_shared<Operation>(world, world.world_group(), std::vector<int>{0, 1},
                                              "all_gather_into #0")) {
    StreamQueue& queue = world.add_stream(0, "side", false);
    operation->issue(0, {.kind = Request::Kind::kAllGather, .output = output, .input = input},
                     queue);
    queue.push_operation(operation, 0);
  }
  bool is_poisoned() const { return output.isnan().all().item<bool>(); }

  at::Tensor input = at::full({1}, 1.0);
  at::Tensor output = at::full({2}, 5.0);
  std::shared_ptr<Operation> operation;
};

TEST(WorldState, starts_with_all_ranks_in_a_group_and_a_compute_queue_each) {
  World world(3, {});
  EXPECT_EQ(world.size(), 3);
  EXPECT_EQ(world.world_group()->name, "world");
  EXPECT_EQ(world.world_group()->ranks, (std::vector<int>{0, 1, 2}));
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(world.compute_queue(rank).rank(), rank);
    EXPECT_TRUE(world.compute_queue(rank).is_compute());
    EXPECT_TRUE(world.compute_queue(rank).empty());
  }
  const StreamQueue& side = world.add_stream(2, "side", false);
  EXPECT_EQ(side.rank(), 2);
  EXPECT_EQ(side.name(), "side");
  EXPECT_FALSE(side.is_compute());
}

TEST(WorldState, lets_a_ranks_own_code_call_alone) {
  World world(2, {});
  EXPECT_EQ(refused([&] { world.check_caller(0, "barrier"); }),
            "barrier of rank 0: called outside run_world");
  const auto body = [&](int rank) {
    EXPECT_EQ(refused([&] { world.check_caller(rank, "barrier"); }), "(accepted)");
    EXPECT_EQ(refused([&] { world.check_caller(1 - rank, "barrier"); }),
              "barrier of rank " + std::to_string(1 - rank) + ": called by rank " +
                  std::to_string(rank) + "; each rank must use its own runtime");
  };
  world.scheduler().run(body, world.options().stack_bytes);
  EXPECT_EQ(world.scheduler().error(), nullptr);
}

// A rank sees NaN where an operation that it did not wait for will write, and what anybody writes
// there afterwards is not poisoned again.
TEST(WorldState, poisons_what_is_in_flight_once_before_the_rank_goes_on) {
  World world(2, {});
  const Gather gather(world);
  EXPECT_FALSE(gather.is_poisoned());
  world.before_resume(1);
  EXPECT_FALSE(gather.is_poisoned()) << "another rank's";
  world.before_resume(0);
  EXPECT_TRUE(gather.is_poisoned());
  EXPECT_EQ(gather.input.item<float>(), 1.0f);
  gather.output.fill_(7);
  world.before_resume(0);
  EXPECT_EQ(gather.output[0].item<float>(), 7.0f);
  world.clear();
}

TEST(WorldState, poisons_nothing_that_has_run_or_when_told_not_to) {
  World world(2, {});
  const Gather gather(world);
  world.remove_in_flight(0, *gather.operation);
  world.before_resume(0);
  EXPECT_FALSE(gather.is_poisoned());
  world.clear();
  World clean(2, {.poison = false});
  const Gather other(clean);
  clean.before_resume(0);
  EXPECT_FALSE(other.is_poisoned());
  clean.clear();
}

// Queues, operations and groups refer to one another: what clear leaves would never be freed.
TEST(WorldState, clear_frees_what_is_left_in_queues_groups_and_waits) {
  std::weak_ptr<World> gone;
  std::weak_ptr<Operation> collective, transfer;
  std::weak_ptr<int> captured;
  {
    const auto world = std::make_shared<World>(2, WorldOptions());
    gone = world;
    const GroupPtr group = world->add_group("pair", {0, 1});
    const auto value = std::make_shared<int>(1);
    captured = value;
    StreamQueue& side = world->add_stream(0, "side", false);
    side.push_closure([value] {});
    // Behind the closure, so that it stays: an event holds its world.
    side.push_record(std::make_shared<SimEvent>(world, side));
    const auto make = [&](const char* label) {
      return std::make_shared<Operation>(*world, group, std::vector<int>{0, 1}, label);
    };
    group->collectives.push_back(make("barrier #0"));
    collective = group->collectives.back();
    group->channels[{0, 1}].unmatched.push_back(make("send #0 from rank 0 to rank 1"));
    transfer = group->channels[{0, 1}].unmatched.back();
    EXPECT_FALSE(side.empty());
    world->clear();
    EXPECT_TRUE(side.empty());
    EXPECT_EQ(world->compute_queue(1).rank(), 1) << "clear must keep the compute queues";
  }
  EXPECT_TRUE(gone.expired());
  EXPECT_TRUE(collective.expired());
  EXPECT_TRUE(transfer.expired());
  EXPECT_TRUE(captured.expired());
}

}  // namespace
}  // namespace ppfsdp::sim
