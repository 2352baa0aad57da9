#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "src/comm/communicator.h"
#include "src/comm/stream.h"
#include "src/fsdp/comm_context.h"
#include "src/fsdp/fully_shard.h"
#include "src/fsdp/layout.h"
#include "src/mesh/device_mesh.h"

namespace ppfsdp::nn {
class Module;
}

namespace ppfsdp::fsdp {

/// A place where a parameter is registered; tied parameters have several.
struct Registration {
  nn::Module* module;
  std::string name;
  at::Tensor* slot;
};

/// One parameter as a group of ranks holds it.
struct FSDPParam {
  std::string fqn;  ///< full name below the module that was sharded; below the root after lazy init
  std::vector<Registration> registrations;
  std::vector<int64_t> sizes;
  /// The registered parameter: a DTensor, Shard(0). Its local part is a view of FSDPParamGroup's
  /// flat shard buffer.
  at::Tensor sharded;
  /// What the slots read while unsharded: one leaf for the whole training; its memory comes and
  /// goes.
  at::Tensor unsharded;
  /// Unsharded gradient accumulated in reduce_dtype while synchronisation is off.
  at::Tensor accumulated_grad;
  at::ScalarType dtype;          ///< of the sharded parameter and its gradient
  at::ScalarType compute_dtype;  ///< of the unsharded one
  /// The parameter before sharding, not kept alive: recognises a tie to a parameter outside.
  c10::weak_intrusive_ptr<c10::TensorImpl> original;
};

/// The parameters of one fully_shard call: gathered by one all-gather, reduced by one
/// reduce-scatter.
///
///   sharded --unshard--> (all-gather in flight) --wait_for_unshard--> unsharded --reshard-->
///   sharded
///
/// or, with reshard_after_forward = k, after forward to a shard over k ranks, and from there back.
///
/// Memory: on CUDA a tensor's memory is given out again to the stream that allocated it as soon as
/// the host drops the last reference, and the host runs ahead of all streams. So each buffer is
/// allocated by the stream that writes it first, and goes only when that stream has waited for the
/// others that use it, or will have before it writes what it allocates next:
///
///   buffer                             of stream       others                who waits, and where
///   flat_ and post_forward_shards_     compute         copy_in, all_gather   wait_for_unshard *
///   gathered, by cast or copy          copy_in         all_gather, compute   wait_for_unshard *
///   gathered, as is                    all_gather      compute               wait_for_unshard *
///   unsharded_memory_                  compute         -
///   unsharded gradients                compute         -
///   reduce-scatter's input             compute         reduce_scatter        finish_reduce
///   reduce-scatter's output, its cast  reduce_scatter  -
///   sharded gradients (these outputs)  reduce_scatter  compute (optimizer)   next reduce_gradients
///
///   * drop_unused_all_gather when nobody took what was gathered
class FSDPParamGroup {
 public:
  enum class TrainingState { kIdle, kForward, kPreBackward, kPostBackward };

  FSDPParamGroup(std::vector<FSDPParam> params, const FullyShardOptions& options);
  ~FSDPParamGroup();
  FSDPParamGroup(const FSDPParamGroup&) = delete;
  FSDPParamGroup& operator=(const FSDPParamGroup&) = delete;

  /// Before the first forward: takes over parameters that were registered in place of the sharded
  /// ones, and checks what only the final model can tell.
  void check_parameters(const std::string& module_fqn);
  void lazy_init(std::shared_ptr<CommContext> context, const std::string& module_fqn);
  bool has_context() const { return context_ != nullptr; }

  /// New shards on `device` without values, in one flat buffer whose padding is zero. Returns the
  /// sharded parameters, which stay the tensors that they are.
  std::vector<at::Tensor> to_empty(c10::Device device);

  /// Issues the all-gather unless the parameters are unsharded, or it is in flight, already.
  void unshard();
  /// Waits for it on the compute stream and lets the slots read the result.
  void wait_for_unshard();
  /// Both, outside forward and backward: after what the compute stream has written so far.
  void unshard_now();
  /// Frees the unsharded parameters.
  void reshard();

  /// `recomputes`: the forward runs inside backward, which needs the parameters next.
  void pre_forward(bool recomputes);
  void post_forward(bool recomputes);
  void pre_backward();
  void post_backward();
  /// At the end of backward: drops an all-gather that nothing used, forgets backward's order.
  void finalize_backward();
  /// Drops an all-gather in flight whose result nobody took.
  void drop_unused_all_gather();
  /// Drops the gradients that wait for their reduction.
  void drop_unsharded_gradients();

  TrainingState training_state() const { return training_state_; }
  void set_training_state(TrainingState state) { training_state_ = state; }
  void set_reduce_grads(bool value) { reduce_grads_ = value; }
  void set_reshard_after_forward(ReshardAfterForward value);
  bool reshard_after_forward_is_unset() const;
  void set_reshard_after_backward(bool value) { reshard_after_backward_ = value; }
  void set_uses_group_memory(bool value) { uses_group_memory_ = value; }
  const std::vector<FSDPParam>& params() const { return params_; }
  bool is_unsharded() const { return state_ == State::kUnsharded; }

 private:
  enum class State { kSharded, kPostForwardSharded, kUnsharded };

  struct Pending {
    at::Tensor output;
    comm::EventPtr event;
    const FlatLayout* layout;
    int64_t versions;
  };

  void set_layouts();
  void shard_parameters(const std::vector<at::Tensor>& originals);
  void make_unsharded_parameters();
  bool parameters_were_replaced() const;
  void adopt_replaced_parameters();
  void adopt_registered_parameters(const std::string& module_fqn);
  void lay_out_shards(c10::Device device, bool keep_values);
  void zero_padding() const;
  at::Tensor local_view(size_t index) const;
  at::Tensor gather_copy(const FlatLayout& layout, comm::Communicator& group,
                         const at::Tensor& shards);
  void to_unsharded();
  void to_sharded();
  void to_post_forward_sharded();
  void free_unsharded();
  int block_size() const;
  FSDPParamGroup* next_in_forward() const;
  FSDPParamGroup* next_in_backward();
  void keep_gradients();
  void reduce_gradients();
  at::Tensor take_gradient(FSDPParam& param);
  void add_sharded_gradient(FSDPParam& param, const at::Tensor& local, comm::Stream& stream);
  int64_t shard_versions() const;
  /// Of its collectives, so that ranks whose graphs have parted do not pair up different groups.
  std::string_view label() const {
    return module_fqn_.empty() ? std::string_view("the root") : module_fqn_;
  }
  comm::Communicator& communicator() const { return mesh_->communicator(0); }
  int64_t world() const { return mesh_->size(0); }
  int64_t rank() const { return mesh_->coordinate(0); }
  /// One rank, one dtype: the unsharded parameter is the sharded one, without copies.
  bool aliased() const { return world() == 1 && !casts_; }

  std::vector<FSDPParam> params_;
  mesh::DeviceMeshPtr mesh_;
  MixedPrecisionPolicy mp_policy_;
  ReshardAfterForward reshard_after_forward_;
  std::string module_fqn_;
  std::shared_ptr<CommContext> context_;

  /// This rank's shards of all parameters, padded, side by side: the all-gather's input as it
  /// stands.
  at::Tensor flat_shards_;
  /// The one piece of memory under all unsharded parameters, as bytes.
  at::Tensor unsharded_memory_;
  /// Each parameter's piece of it as the gathered buffer's elements, without autograd: what
  /// copy-out fills. Empty as long as there are none.
  std::vector<at::Tensor> unsharded_flats_;
  /// This rank's part after forward with reshard_after_forward = k.
  at::Tensor post_forward_shards_;
  /// Of flat_shards_, in elements of shard_dtype_; and of the gathered buffer, in elements of
  /// gather_dtype_. A dtype that differs between parameters makes the elements bytes.
  FlatLayout shard_layout_;
  FlatLayout gather_layout_;
  FlatLayout post_forward_layout_;
  at::ScalarType shard_dtype_;
  at::ScalarType gather_dtype_;
  bool casts_ = false;
  /// Of the shards when they were last gathered: a later change makes the unsharded ones stale.
  int64_t gathered_versions_ = 0;

  State state_ = State::kSharded;
  TrainingState training_state_ = TrainingState::kIdle;
  std::optional<Pending> pending_;
  bool reduce_grads_ = true;
  bool reshard_after_backward_ = true;
  bool uses_group_memory_ = false;
  std::vector<size_t> post_forward_indices_;
};

}  // namespace ppfsdp::fsdp
