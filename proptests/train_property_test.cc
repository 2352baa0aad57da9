// Sharded training equals one device's, bit for bit: the reference folds gradients in the mesh's
// own order, so no tolerance is needed and any difference is a fault.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <limits>

#include "proptests/llama_case.h"
#include "sim/mesh/world.h"

namespace ppfsdp::proptests {
namespace {

int draw(int low, int high) { return *rc::gen::inRange(low, high + 1); }

fsdp::ReshardAfterForward draw_reshard(int world) {
  std::vector<fsdp::ReshardAfterForward> choices = {fsdp::ReshardAfterForward(), true, false};
  for (int k = 2; k < world; ++k) {
    if (world % k == 0) {
      choices.emplace_back(k);
    }
  }
  return choices[draw(0, static_cast<int>(choices.size()) - 1)];
}

LlamaCase draw_case() {
  LlamaCase c;
  c.world = draw(1, 8);
  c.model.n_heads = draw(1, 4);
  c.model.dim = c.model.n_heads * 2 * draw(1, 3);
  std::vector<int64_t> kv_heads;
  for (int64_t k = 1; k <= c.model.n_heads; ++k) {
    if (c.model.n_heads % k == 0) {
      kv_heads.push_back(k);
    }
  }
  c.model.n_kv_heads = kv_heads[draw(0, static_cast<int>(kv_heads.size()) - 1)];
  c.model.hidden_dim = draw(1, 19);
  c.model.vocab_size = draw(2, 31);
  c.model.n_layers = draw(1, 4);
  c.model.tied_output = draw(0, 3) == 0;
  c.seq = draw(2, 6);
  c.model.max_seq_len = c.seq;
  c.batch = draw(1, 2);
  c.microbatches = draw(1, 3);
  c.reshard = draw_reshard(c.world);
  const std::vector<std::optional<at::ScalarType>> dtypes = {std::nullopt, at::kBFloat16};
  c.policy.param_dtype = dtypes[draw(0, 1)];
  const std::vector<std::optional<at::ScalarType>> reduce = {std::nullopt, at::kFloat,
                                                             at::kBFloat16};
  c.policy.reduce_dtype = reduce[draw(0, 2)];
  c.adamw = draw(0, 1) == 0;
  c.max_norm = std::vector<double>{0.1, 1.0, 1000.0}[draw(0, 2)];
  c.norm_type = std::vector<double>{2, 1, 3, std::numeric_limits<double>::infinity()}[draw(0, 3)];
  c.frozen = std::vector<std::string>{"", "", "attention", "layers.0", "norm"}[draw(0, 4)];
  c.seed = static_cast<uint64_t>(draw(0, 1000000));
  c.mesh.seed = static_cast<uint64_t>(draw(0, 1000000));
  c.mesh.schedule = draw(0, 3) == 0 ? sim::Schedule::kRoundRobin : sim::Schedule::kRandom;
  c.mesh.order =
      std::vector{comm::ReductionOrder::kRankOrder, comm::ReductionOrder::kGlooRing,
                  comm::ReductionOrder::kNcclRing, comm::ReductionOrder::kTree}[draw(0, 3)];
  return c;
}

// The whole claim: loss, norm, clipped gradients and parameters of every step on every rank. It
// fails for a stale gather, a lost, doubled or misplaced gradient, a wrong average, a norm of local
// shards, a missing wait on any schedule, a tie that comes apart.
TEST(TrainProperty, ShardedEqualsOneDeviceBitForBit) {
  int clipped = 0, uneven = 0, with_gather = 0, steps = 0;
  const bool held = rc::check("sharded training equals one device's", [&] {
    const LlamaCase c = draw_case();
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
