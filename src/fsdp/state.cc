#include "src/fsdp/state.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <functional>
#include <utility>

namespace ppfsdp::fsdp {
namespace {

using TrainingState = FSDPParamGroup::TrainingState;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Carries a weak pointer through the autograd graph, which may outlive the module.
struct StateHolder : torch::CustomClassHolder {
  explicit StateHolder(std::function<void()> post_backward)
      : post_backward(std::move(post_backward)) {}
  std::function<void()> post_backward;
};

/// Identity on a module's inputs whose backward runs when the gradients of all of them are there:
/// by then the gradients of the module's parameters are complete.
struct PostBackward : torch::autograd::Function<PostBackward> {
  static variable_list forward(AutogradContext* context, const std::function<void()>& post_backward,
                               at::TensorList inputs) {
    // A gradient that nothing asks for stays undefined, as in the plain model.
    context->set_materialize_grads(false);
    context->saved_data["post_backward"] =
        c10::IValue::make_capsule(c10::make_intrusive<StateHolder>(post_backward));
    return inputs.vec();
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto holder = context->saved_data["post_backward"].toCapsule();
    static_cast<StateHolder*>(holder.get())->post_backward();
    grads.insert(grads.begin(), at::Tensor());
    return grads;
  }
};

void collect_states(torch::nn::Module& module, const std::string& name,
                    std::vector<std::pair<std::string, FSDPState*>>& out) {
  if (auto* ours = dynamic_cast<nn::Module*>(&module)) {
    if (auto* state = dynamic_cast<FSDPState*>(ours->extension("fsdp"))) {
      out.emplace_back(name, state);
    }
  }
  for (const auto& child : module.named_children()) {
    collect_states(*child.value(), name.empty() ? child.key() : name + "." + child.key(), out);
  }
}

void cast_floating(const nn::Module::TensorRefs& tensors, at::ScalarType dtype) {
  for (at::Tensor* tensor : tensors) {
    if (at::isFloatingType(tensor->scalar_type()) && tensor->scalar_type() != dtype) {
      *tensor = tensor->to(dtype);
    }
  }
}

}  // namespace

FSDPState::FSDPState(nn::Module& module, const FullyShardOptions& options,
                     std::unique_ptr<FSDPParamGroup> group)
    : module_(&module), options_(options), group_(std::move(group)) {}

void FSDPState::install_hooks() {
  module_->register_forward_pre_hook(
      [this](nn::Module&, const nn::Module::TensorRefs& inputs) { pre_forward(inputs); },
      /*prepend=*/true);
  module_->register_forward_hook(
      [this](nn::Module&, const nn::Module::TensorRefs& outputs) { post_forward(outputs); });
}

std::vector<FSDPState*> FSDPState::states_below() {
  std::vector<std::pair<std::string, FSDPState*>> named;
  collect_states(*module_, "", named);
  std::vector<FSDPState*> states;
  for (const auto& [name, state] : named) {
    if (std::find(states.begin(), states.end(), state) == states.end()) {
      states.push_back(state);
    }
  }
  return states;
}

void FSDPState::lazy_init() {
  if (is_root_.has_value()) {
    return;
  }
  std::vector<std::pair<std::string, FSDPState*>> named;
  collect_states(*module_, "", named);
  for (const auto& [name, state] : named) {
    TORCH_CHECK(state == this || !state->is_root_.has_value(), "fully_shard: module '", name,
                "' ran forward before its root did and became a root of its own; the first forward "
                "after fully_shard must be the root's");
  }
  context_ = std::make_shared<CommContext>(options_.mesh->runtime());
  for (const auto& [name, state] : named) {
    if (state->root_ != nullptr) {
      continue;  // a shared module, seen under another name
    }
    state->root_ = this;
    state->is_root_ = state == this;
    state->context_ = context_;
    all_states_.push_back(state);
    if (state->group_ == nullptr) {
      continue;
    }
    state->group_->lazy_init(context_, name);
    if (state->group_->reshard_after_forward_is_unset()) {
      // The root's parameters are needed first in backward: freeing them would gather them at once.
      state->group_->set_reshard_after_forward(state != this);
    }
  }
}

void FSDPState::begin_forward() {
  lazy_init();
  if (context_->forward_root != nullptr && !*is_root_) {
    return;
  }
  context_->forward_root = this;
  context_->running_order.clear();
  // Left over from a forward or backward that an exception ended.
  for (FSDPState* state : root_->all_states_) {
    state->training_state_ = TrainingState::kIdle;
    if (state->group_ != nullptr) {
      state->group_->set_training_state(TrainingState::kIdle);
      state->group_->drop_unused_all_gather();
    }
  }
  root_->final_callback_queued_ = false;
  // The optimizer's writes come before the gathers that read them.
  context_->all_gathers_wait(context_->runtime.compute_stream().record());
}

void FSDPState::pre_forward(const nn::Module::TensorRefs& inputs) {
  if (training_state_ == TrainingState::kPreBackward) {
    return;  // recomputation inside backward: pre_backward has unsharded already
  }
  begin_forward();
  training_state_ = TrainingState::kForward;
  if (options_.mp_policy.cast_forward_inputs && options_.mp_policy.param_dtype.has_value()) {
    cast_floating(inputs, *options_.mp_policy.param_dtype);
  }
  if (group_ == nullptr) {
    return;
  }
  group_->pre_forward();
  if (!c10::GradMode::is_enabled()) {
    return;
  }
  variable_list differentiable;
  for (const at::Tensor* input : inputs) {
    if (input->requires_grad()) {
      differentiable.push_back(*input);
    }
  }
  if (differentiable.empty()) {
    return;  // the root's final callback reduces this group's gradients
  }
  const std::weak_ptr<FSDPState> weak = weak_from_this();
  const std::function<void()> post_backward = [weak] {
    if (const auto state = weak.lock()) {
      state->post_backward();
    }
  };
  const variable_list passed = PostBackward::apply(post_backward, at::TensorList(differentiable));
  size_t next = 0;
  for (at::Tensor* input : inputs) {
    if (input->requires_grad()) {
      *input = passed[next++];
    }
  }
}

void FSDPState::post_forward(const nn::Module::TensorRefs& outputs) {
  if (training_state_ == TrainingState::kPreBackward) {
    return;
  }
  if (group_ != nullptr) {
    group_->post_forward();
  }
  for (const at::Tensor* output : outputs) {
    if (output->requires_grad()) {
      const std::weak_ptr<FSDPState> weak = weak_from_this();
      output->register_hook([weak](const at::Tensor&) {
        if (const auto state = weak.lock()) {
          state->pre_backward();
        }
      });
    }
  }
  training_state_ = TrainingState::kIdle;
  if (context_->forward_root == this) {
    context_->forward_root = nullptr;
    context_->forward_order = context_->running_order;
  }
  if (options_.mp_policy.output_dtype.has_value()) {
    cast_floating(outputs, *options_.mp_policy.output_dtype);
  }
}

void FSDPState::pre_backward() {
  training_state_ = TrainingState::kPreBackward;
  root_->queue_final_callback();
  if (group_ != nullptr) {
    group_->pre_backward();
  }
}

void FSDPState::post_backward() {
  if (group_ != nullptr) {
    group_->post_backward();
  }
  training_state_ = TrainingState::kIdle;
}

void FSDPState::queue_final_callback() {
  if (final_callback_queued_) {
    return;
  }
  final_callback_queued_ = true;
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
    if (const auto state = weak.lock()) {
      state->end_backward();
    }
  });
}

void FSDPState::end_backward() {
  // Deepest first, as backward itself would have gone.
  for (auto it = all_states_.rbegin(); it != all_states_.rend(); ++it) {
    FSDPState& state = **it;
    FSDPParamGroup* group = state.group_.get();
    if (group != nullptr && group->training_state() != TrainingState::kPostBackward) {
      group->post_backward();
    }
    state.training_state_ = TrainingState::kIdle;
    if (group != nullptr) {
      group->set_training_state(TrainingState::kIdle);
      if (is_last_backward_) {
        group->finalize_backward();
      }
    }
  }
  if (is_last_backward_) {
    context_->post_forward_order.clear();
    context_->finish_reduce();
  }
  final_callback_queued_ = false;
}

void FSDPState::set_is_last_backward(bool value) {
  for (FSDPState* state : states_below()) {
    state->is_last_backward_ = value;
  }
}

void FSDPState::unshard() {
  if (group_ != nullptr) {
    group_->unshard_now();
  }
}

void FSDPState::reshard() {
  if (group_ != nullptr) {
    group_->reshard();
  }
}

}  // namespace ppfsdp::fsdp
