#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "src/fsdp/comm_context.h"
#include "src/fsdp/fully_shard.h"
#include "src/fsdp/param_group.h"
#include "src/nn/module.h"

namespace ppfsdp::fsdp {

/// What fully_shard attaches to a module: its group, and the hooks that drive it.
class FSDPState : public nn::ModuleExtension, public std::enable_shared_from_this<FSDPState> {
 public:
  FSDPState(nn::Module& module, const FullyShardOptions& options,
            std::unique_ptr<FSDPParamGroup> group);

  ~FSDPState() override;
  FSDPState(const FSDPState&) = delete;
  FSDPState& operator=(const FSDPState&) = delete;

  /// Installs the forward hooks; the module keeps the state alive.
  void install_hooks();

  nn::Module& module() const { return *module_; }
  /// Null when every parameter below belongs to another group.
  FSDPParamGroup* group() const { return group_.get(); }
  /// This state and those of the modules below, in module order.
  std::vector<FSDPState*> states_below();
  void set_is_last_backward(bool value);
  std::vector<at::Tensor> to_empty(c10::Device device) override;
  void unshard();
  void reshard();

 private:
  void lazy_init();
  void check_materialized() const;
  void begin_forward();
  void pre_forward(const nn::Module::TensorRefs& inputs);
  void post_forward(const nn::Module::TensorRefs& outputs);
  void forward_failed();
  void pre_backward();
  void post_backward();
  void queue_final_callback();
  void end_backward();
  void forget_failed_backward();

  nn::Module* module_;
  FullyShardOptions options_;
  std::unique_ptr<FSDPParamGroup> group_;
  FSDPParamGroup::TrainingState training_state_ = FSDPParamGroup::TrainingState::kIdle;

  /// Unset until the first forward decides who the root is.
  std::optional<bool> is_root_;
  FSDPState* root_ = nullptr;
  std::shared_ptr<CommContext> context_;

  /// Of the root only: itself and the states below. A module may go before the root does.
  std::vector<std::weak_ptr<FSDPState>> all_states_;
  /// Of the root: whether a backward has begun and not ended; and what lives as long as autograd
  /// runs it.
  bool backward_began_ = false;
  std::weak_ptr<void> backward_;
  /// Of the root; before there is one, of each state.
  bool is_last_backward_ = true;
};

}  // namespace ppfsdp::fsdp
