#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include "src/mesh/device_mesh.h"

namespace ppfsdp::nn {
class Module;
}

namespace ppfsdp::fsdp {

class FSDPState;

/// Dtypes of the unsharded computation. Unset means the parameter's (gradient's) own.
struct MixedPrecisionPolicy {
  std::optional<at::ScalarType> param_dtype = {};   ///< all-gather and compute
  std::optional<at::ScalarType> reduce_dtype = {};  ///< reduce-scatter; unset: the gradient's dtype
  std::optional<at::ScalarType> output_dtype =
      {};                           ///< floating-point outputs of the module's forward
  bool cast_forward_inputs = true;  ///< floating-point inputs to param_dtype
};

/// What happens to the unsharded parameters after forward.
///   unset: freed, and gathered again in backward, except for the root, which keeps them;
///   true / false: freed / kept;
///   int k: kept sharded over k ranks (k divides the shard size; 1 means false, the shard size
///   true).
using ReshardAfterForward = std::variant<std::monostate, bool, int>;

struct FullyShardOptions {
  /// 1D.
  mesh::DeviceMeshPtr mesh = {};
  ReshardAfterForward reshard_after_forward = {};
  MixedPrecisionPolicy mp_policy = {};
};

/// A fully sharded module's methods; cheap to copy, does not keep the module alive.
class FSDPModule {
 public:
  explicit FSDPModule(FSDPState* state) : state_(state) {}

  /// Whether backward reduces gradients. With false, unsharded gradients accumulate (in
  /// reduce_dtype, if that is set) and the next synchronising backward reduces their sum.
  /// `recurse`: also every fully sharded module below.
  void set_requires_gradient_sync(bool requires_gradient_sync, bool recurse = true);
  /// Whether the next backward is the last before the optimizer; only then are the pending
  /// reduce-scatters waited for and the backward's order forgotten. True by default. Any module may
  /// say it for all that share its root.
  void set_is_last_backward(bool is_last_backward);
  void set_reshard_after_forward(bool reshard_after_forward, bool recurse = true);
  void set_reshard_after_backward(bool reshard_after_backward, bool recurse = true);
  /// Whether this module's own all-gather and reduce-scatter use memory that the communicator makes
  /// (Communicator::allocate), from which NCCL copies without staging: the gathered buffer, in
  /// which the shards are gathered in place, and the reduce-scatter's input and output. The
  /// gradients lie in that output. False by default; not recursive; changes no value.
  void set_allocate_memory_from_process_group_for_comm(bool enable);
  /// Gathers this module's own parameters now, or frees them; not recursive.
  void unshard();
  void reshard();

  FSDPState& state() const { return *state_; }

 private:
  FSDPState* state_;
};

/// Shards the parameters of `module` that no fully_shard below it owns over options.mesh, as one
/// communication group, and installs the hooks that gather them for use and reduce their gradients.
/// Apply it bottom-up: blocks first, then the root. Afterwards module.parameters() are DTensors;
/// make the optimizer from those. Every rank calls it alike.
///
/// Parameters and buffers go to the mesh's device. Those on meta stay there, and take no memory:
/// nn::to_empty then gives each rank its shards, and nn::reset_all_parameters, or
/// checkpoint::load_weights, their values, so that no rank ever holds the model whole. The first
/// forward throws, naming them, when any are on meta still.
///
/// Throws for a module already sharded, a bare container, a parameter without a slot, a scalar or
/// non-contiguous parameter, a module of which a part is on meta, a mesh that is not 1D.
FSDPModule fully_shard(nn::Module& module, const FullyShardOptions& options);

/// The handle of a module that fully_shard was applied to; an error otherwise.
FSDPModule fsdp_module(nn::Module& module);

}  // namespace ppfsdp::fsdp
