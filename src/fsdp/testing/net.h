#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "sim/mesh/world.h"
#include "src/fsdp/fully_shard.h"
#include "src/nn/module.h"

namespace ppfsdp::fsdp::testing {

/// relu(x w^T) v^T, w [hidden, width], v [width, hidden].
class BlockImpl : public nn::Module {
 public:
  BlockImpl(int64_t width, int64_t hidden);
  at::Tensor forward(const at::Tensor& x);
  at::Tensor w;
  at::Tensor v;
  /// Called before and after the computation; a test may look, or throw.
  std::function<void()> on_forward = [] {};
};
PPFSDP_MODULE(Block);

/// Blocks of one width that run along `path`, by default each once in order, then a scale of the
/// model's own. All values are small integers in fp64, so that every sum is exact in any order.
class NetImpl : public nn::Module {
 public:
  using Path = std::function<at::Tensor(NetImpl& net, at::Tensor x)>;
  explicit NetImpl(const std::vector<int64_t>& hidden);
  at::Tensor forward(const at::Tensor& x);
  std::vector<Block> blocks;
  at::Tensor scale;
  Path path;
};
PPFSDP_MODULE(Net);

constexpr int64_t kWidth = 3;

/// A path through the blocks with these indices.
NetImpl::Path along(std::vector<int> indices);

/// One rank's run of a scenario, on a plain model or on a sharded one: the same code for both.
struct Trial {
  Net net{nullptr};
  std::optional<FSDPModule> fsdp;
  int rank = 0;
  /// What the scenario wants compared: equal on each rank to that rank's plain trial.
  std::vector<at::Tensor> seen;

  /// This rank's `k`-th input, [4, kWidth], where the model is.
  at::Tensor input(int k) const;
  /// Loss of the model on that input. Gradients are multiples of 840, so that averages over up to 8
  /// ranks are exact.
  at::Tensor loss(int k);
  /// An optimizer step that keeps values small: p = 1 - p.
  void update();
  void zero_grad();
};

using Scenario = std::function<void(Trial& trial)>;

struct ScenarioOptions {
  std::vector<int64_t> hidden = {5, 7, 1};
  std::vector<int> worlds = {1, 2, 3, 5, 7, 8};
  std::vector<ReshardAfterForward> reshards = {ReshardAfterForward(), true, false};
};

/// Runs `scenario` for each rank on a plain model in turn, and sharded (each block, then the model)
/// over every world, reshard flag and two schedules; expects the same outputs, the same parameters
/// and, as gradients, the average of the ranks'.
void expect_as_plain(const Scenario& scenario, const ScenarioOptions& options = {});

/// A sharded Net over all ranks of `runtime`.
Trial make_sharded(comm::Runtime& runtime, const std::vector<int64_t>& hidden,
                   const FullyShardOptions& options);

}  // namespace ppfsdp::fsdp::testing
