#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "src/comm/reduction.h"
#include "src/comm/runtime.h"
#include "src/fsdp/fully_shard.h"
#include "src/nn/module.h"

namespace ppfsdp::fsdp::testing {

/// relu(x w^T + b): the smallest module with two parameters.
class LayerImpl : public nn::Module {
 public:
  LayerImpl(int64_t in, int64_t out);
  at::Tensor forward(const at::Tensor& x);
  at::Tensor w;
  at::Tensor b;
};
PPFSDP_MODULE(Layer);

/// Layers of the given widths, then a scale that belongs to the model itself.
class MlpImpl : public nn::Module {
 public:
  explicit MlpImpl(const std::vector<int64_t>& widths);
  at::Tensor forward(at::Tensor x);
  std::vector<Layer> layers;
  at::Tensor scale;
};
PPFSDP_MODULE(Mlp);

/// A model with values that depend on `seed` alone, not on who runs beside it.
Mlp make_mlp(const std::vector<int64_t>& widths, uint64_t seed);

/// Applies fully_shard to each layer, then to the model.
FSDPModule shard_mlp(Mlp& model, const FullyShardOptions& options);

/// Input of rank `rank` in step `step`, microbatch `micro`: [4, width].
at::Tensor batch(int64_t width, int rank, int step, int micro);

/// What training Mlp over `world` ranks must give, by one process on a plain model: each rank's
/// microbatches in turn, gradients averaged in `order` over the flat buffers that the groups (each
/// layer, then the scale) would make, plain SGD. Returns each parameter after `steps` steps.
struct MlpReference {
  std::vector<int64_t> widths;
  uint64_t seed = 1;
  int world = 1;
  int steps = 1;
  int microbatches = 1;
  double lr = 0.1;
  comm::ReductionOrder order = comm::ReductionOrder::kGlooRing;
  MixedPrecisionPolicy policy;
};
std::vector<at::Tensor> train_reference(const MlpReference& config);

/// The same by fully_shard on `runtime`, every group with `reshard`.
std::vector<at::Tensor> train_sharded(const MlpReference& config, comm::Runtime& runtime,
                                      ReshardAfterForward reshard);

}  // namespace ppfsdp::fsdp::testing
