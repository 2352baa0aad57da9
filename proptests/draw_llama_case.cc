#include "proptests/draw_llama_case.h"

#include <rapidcheck.h>

#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace ppfsdp::proptests {
namespace {

fsdp::ReshardAfterForward draw_reshard(int world) {
  std::vector<fsdp::ReshardAfterForward> choices = {fsdp::ReshardAfterForward(), true, false};
  for (int k = 2; k < world; ++k) {
    if (world % k == 0) {
      choices.emplace_back(k);
    }
  }
  return choices[draw(0, static_cast<int>(choices.size()) - 1)];
}

}  // namespace

int draw(int low, int high) { return *rc::gen::inRange(low, high + 1); }

LlamaCase draw_llama_case(int most_ranks) {
  LlamaCase c;
  c.world = draw(1, most_ranks);
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

}  // namespace ppfsdp::proptests
