#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "src/comm/reduction.h"
#include "src/nn/module.h"

namespace ppfsdp::train {

/// The sharded training that a ReferenceTrainer repeats.
struct ReferenceOptions {
  int world = 1;
  /// How the mesh folds.
  comm::ReductionOrder order = comm::ReductionOrder::kGlooRing;
  /// As fsdp::MixedPrecisionPolicy's; unset is the parameter's (gradient's) own.
  std::optional<at::ScalarType> param_dtype;
  std::optional<at::ScalarType> reduce_dtype;
};

/// What fully_shard must equal bit for bit: one process that runs each rank's microbatches in turn
/// on a plain model, and folds the gradients in the mesh's own order.
///
/// It shares no code with fully_shard: no hook, stream, collective or flat parameter. For each
/// group the ranks' gradients are padded to equal shards, laid side by side as a reduce-scatter
/// sees them, and averaged by comm::reduce_range. With one rank and no other dtype it is plain
/// training.
class ReferenceTrainer {
 public:
  /// `groups`: the modules that fully_shard is applied to, in its order (blocks first, the root
  /// last). They must outlive this. Throws for a parameter of the root without a slot.
  ReferenceTrainer(const std::vector<nn::Module*>& groups, const ReferenceOptions& options);

  /// The root's parameters that require grad: what the optimizer takes.
  std::vector<at::Tensor> parameters() const;

  /// The loss of one rank's microbatch, from a forward on the root.
  using Loss = std::function<at::Tensor(int rank, int microbatch)>;
  /// Forward and backward of every microbatch of every rank. Adds the reduced gradients to the
  /// parameters' and returns the losses, [rank][microbatch].
  std::vector<std::vector<double>> backward(int microbatches, const Loss& loss);

  /// Clips as optim::clip_grad_norm_ does on sharded gradients and returns the norm
  /// before: the norms of each rank's shards are folded in the mesh's order. `norm_type`: positive
  /// or infinity. A reproducible norm is the one of NormOptions.
  double clip_grad_norm_(double max_norm, double norm_type, bool reproducible = false);

 private:
  struct Parameter {
    std::string name;
    at::Tensor master;                ///< the registered entry
    std::vector<at::Tensor*> slots;   ///< what forward reads
    at::Tensor compute;               ///< a leaf that the slots point at while a rank runs
    at::Tensor accumulated;           ///< earlier microbatches' gradient in reduce_dtype
    std::vector<at::Tensor> by_rank;  ///< each rank's gradient; undefined when it has none
  };
  using Group = std::vector<size_t>;  // indices of parameters_

  bool plain() const {
    return options_.world == 1 && !options_.param_dtype && !options_.reduce_dtype;
  }
  void begin_computation();
  void end_computation();
  void keep_gradient(Parameter& parameter) const;
  void reduce(const Group& group);
  void add_to_grad(Parameter& parameter, const at::Tensor& grad) const;
  std::vector<at::Tensor> folded_norms(const std::vector<at::Tensor>& grads,
                                       double norm_type) const;

  ReferenceOptions options_;
  std::vector<Parameter> parameters_;
  std::vector<Group> groups_;
};

}  // namespace ppfsdp::train
