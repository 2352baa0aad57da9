// Sharded training equals one device's, bit for bit: the reference folds gradients in the mesh's
// own order, so no tolerance is needed and any difference is a fault.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "proptests/draw_llama_case.h"
#include "proptests/llama_case.h"
#include "sim/mesh/world.h"

namespace ppfsdp::proptests {
namespace {

// The whole claim: loss, norm, clipped gradients and parameters of every step on every rank. It
// fails for a stale gather, a lost, doubled or misplaced gradient, a wrong average, a norm of local
// shards, a missing wait on any schedule, a tie that comes apart.
TEST(TrainProperty, ShardedEqualsOneDeviceBitForBit) {
  int clipped = 0, uneven = 0, with_gather = 0, steps = 0;
  const bool held = rc::check("sharded training equals one device's", [&] {
    const LlamaCase c = draw_llama_case(8);
    RC_LOG() << "replay: " << c.str() << "\n";
    const std::vector<LlamaResult> want = train_reference(c);
    sim::run_world(c.world, c.mesh, [&](comm::Runtime& runtime) {
      const LlamaResult got = train_sharded(c, runtime);
      const std::string difference = first_difference(got, want[runtime.rank()]);
      if (!difference.empty()) {
        throw std::runtime_error(difference);
      }
      with_gather += runtime.rank() == 0 && runtime.world()->sequence() > 0;
    });
    for (const double norm : want[0].norms) {
      ++steps;
      clipped += norm > c.max_norm;
    }
    uneven += c.model.dim % c.world != 0 || c.model.hidden_dim % c.world != 0;
  });
  EXPECT_TRUE(held);
  // The cases must have been worth drawing.
  EXPECT_GT(clipped, steps / 4);
  EXPECT_LT(clipped, steps);
  EXPECT_GT(uneven, 25);
  EXPECT_GT(with_gather, 50);
}

}  // namespace
}  // namespace ppfsdp::proptests
