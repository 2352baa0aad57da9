#include "src/fsdp/state.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

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

/// A forward inside backward recomputes what activation checkpointing dropped.
bool inside_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

/// The state that a hook of the graph belongs to. Without it the memory of the parameters that
/// backward reads is gone too.
std::shared_ptr<FSDPState> alive(const std::weak_ptr<FSDPState>& weak) {
  std::shared_ptr<FSDPState> state = weak.lock();
  TORCH_CHECK(state != nullptr,
              "fully_shard: backward through a module that has been destroyed since its forward; "
              "keep the model until backward has run");
  return state;
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

// What outlives its root may run again, below a root of its own.
FSDPState::~FSDPState() {
  for (const std::weak_ptr<FSDPState>& weak : all_states_) {
    if (const auto state = weak.lock()) {
      state->root_ = nullptr;
      state->is_root_.reset();
    }
  }
}

void FSDPState::install_hooks() {
  module_->register_forward_pre_hook(
      [this](nn::Module&, const nn::Module::TensorRefs& inputs) { pre_forward(inputs); },
      /*prepend=*/true);
  module_->register_forward_hook(
      [this](nn::Module&, const nn::Module::TensorRefs& outputs) { post_forward(outputs); });
  module_->register_forward_error_hook([this](nn::Module&) { forward_failed(); });
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

std::vector<at::Tensor> FSDPState::to_empty(c10::Device device) {
  return group_ == nullptr ? std::vector<at::Tensor>() : group_->to_empty(device);
}

// A device that is meta itself, of a simulated step, holds everything there.
void FSDPState::check_materialized() const {
  if (options_.mesh->runtime().device().is_meta()) {
    return;
  }
  constexpr size_t kMostNames = 16;
  std::string names;
  size_t count = 0;
  for (const auto& tensors : {module_->named_parameters(), module_->named_buffers()}) {
    for (const auto& item : tensors) {
      if (item.value().is_meta() && ++count <= kMostNames) {
        names += (count == 1 ? "'" : ", '") + item.key() + "'";
      }
    }
  }
  if (count > kMostNames) {
    names += " and " + std::to_string(count - kMostNames) + " more";
  }
  TORCH_CHECK(
      count == 0, "fully_shard: still on meta at the first forward: ", names,
      "; call nn::to_empty(model, device) and then nn::reset_all_parameters(model), or load "
      "weights");
}

void FSDPState::lazy_init() {
  if (is_root_.has_value()) {
    return;
  }
  check_materialized();
  std::vector<std::pair<std::string, FSDPState*>> named;
  collect_states(*module_, "", named);
  for (const auto& [name, state] : named) {
    TORCH_CHECK(state == this || !state->is_root_.has_value(), "fully_shard: module '", name,
                "' ran forward before its root did and became a root of its own; the first forward "
                "after fully_shard must be the root's");
  }
  for (const auto& [name, state] : named) {
    if (state->group_ != nullptr && state->root_ == nullptr) {
      state->group_->check_parameters(name);
    }
  }
  context_ = std::make_shared<CommContext>(options_.mesh->runtime());
  bool is_last_backward = true;
  for (const auto& [name, state] : named) {
    if (state->root_ != nullptr) {
      continue;  // a shared module, seen under another name
    }
    if (!std::exchange(state->is_last_backward_, true)) {
      is_last_backward = false;
    }
    state->root_ = this;
    state->is_root_ = state == this;
    state->context_ = context_;
    all_states_.push_back(state->weak_from_this());
    if (state->group_ == nullptr) {
      continue;
    }
    state->group_->lazy_init(context_, name);
    if (state->group_->reshard_after_forward_is_unset()) {
      // The root's parameters are needed first in backward: freeing them would gather them at once.
      state->group_->set_reshard_after_forward(state != this);
    }
  }
  is_last_backward_ = is_last_backward;
}

void FSDPState::begin_forward() {
  lazy_init();
  if (inside_backward() || (context_->forward_root != nullptr && !*is_root_)) {
    return;
  }
  root_->forget_failed_backward();
  context_->forward_root = this;
  context_->running_order.clear();
  // Left over from a forward that an exception ended: all-gathers that other ranks may never join,
  // so that they are not waited for earlier. If the shards have been written since, their results
  // are worth nothing; nor is anyone to take them.
  for (const std::weak_ptr<FSDPState>& weak : root_->all_states_) {
    const auto state = weak.lock();
    if (state == nullptr) {
      continue;
    }
    state->training_state_ = TrainingState::kIdle;
    if (state->group_ != nullptr) {
      state->group_->set_training_state(TrainingState::kIdle);
      state->group_->drop_unused_all_gather();
    }
  }
  // The optimizer's writes come before the gathers that read them.
  context_->all_gathers_wait(context_->runtime.compute_stream().record());
}

void FSDPState::pre_forward(const nn::Module::TensorRefs& inputs) {
  begin_forward();
  if (options_.mp_policy.cast_forward_inputs && options_.mp_policy.param_dtype.has_value()) {
    cast_floating(inputs, *options_.mp_policy.param_dtype);
  }
  if (training_state_ == TrainingState::kPreBackward) {
    // Recomputation for the module's own backward, whose hooks do the rest. The post-backward of
    // another use may have freed the parameters since.
    if (group_ != nullptr) {
      group_->unshard();
      group_->wait_for_unshard();
    }
    return;
  }
  training_state_ = TrainingState::kForward;
  if (group_ == nullptr) {
    return;
  }
  group_->pre_forward(inside_backward());
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
  const std::function<void()> post_backward = [weak] { alive(weak)->post_backward(); };
  const variable_list passed = PostBackward::apply(post_backward, at::TensorList(differentiable));
  size_t next = 0;
  for (at::Tensor* input : inputs) {
    if (input->requires_grad()) {
      *input = passed[next++];
    }
  }
}

void FSDPState::post_forward(const nn::Module::TensorRefs& outputs) {
  if (training_state_ != TrainingState::kPreBackward) {
    if (group_ != nullptr) {
      group_->post_forward(inside_backward());
    }
    for (const at::Tensor* output : outputs) {
      if (output->requires_grad()) {
        const std::weak_ptr<FSDPState> weak = weak_from_this();
        output->register_hook([weak](const at::Tensor&) { alive(weak)->pre_backward(); });
      }
    }
    training_state_ = TrainingState::kIdle;
    if (context_->forward_root == this) {
      context_->forward_root = nullptr;
      context_->forward_order = context_->running_order;
      // What was gathered ahead for a block that did not run. Backward will not need it, and an
      // optimizer may be the next to write the shards.
      for (const std::weak_ptr<FSDPState>& weak : root_->all_states_) {
        const auto state = weak.lock();
        if (state != nullptr && state->group_ != nullptr) {
          state->group_->drop_unused_all_gather();
        }
      }
    }
  }
  if (options_.mp_policy.output_dtype.has_value()) {
    cast_floating(outputs, *options_.mp_policy.output_dtype);
  }
}

// What runs next is an outermost forward of its own, even if it is a block alone.
void FSDPState::forward_failed() {
  if (context_ != nullptr && context_->forward_root == this) {
    context_->forward_root = nullptr;
  }
}

void FSDPState::pre_backward() {
  TORCH_CHECK(root_ != nullptr,
              "fully_shard: backward through a module whose root has been destroyed since its "
              "forward; keep the model until backward has run");
  root_->queue_final_callback();
  training_state_ = TrainingState::kPreBackward;
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
  if (!backward_.expired()) {
    return;
  }
  forget_failed_backward();
  backward_began_ = true;
  // Autograd drops its callbacks when backward ends, be it by an exception.
  const auto backward = std::make_shared<char>();
  backward_ = backward;
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this(), backward] {
    if (const auto state = weak.lock()) {
      state->end_backward();
    }
  });
}

void FSDPState::end_backward() {
  // Deepest first, as backward itself would have gone.
  for (auto it = all_states_.rbegin(); it != all_states_.rend(); ++it) {
    const auto state = it->lock();
    if (state == nullptr) {
      continue;
    }
    FSDPParamGroup* group = state->group_.get();
    if (group != nullptr && group->training_state() != TrainingState::kPostBackward) {
      group->post_backward();
    }
    state->training_state_ = TrainingState::kIdle;
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
  backward_began_ = false;
  backward_.reset();
}

// An exception ended the last backward: what gradients it left unreduced belong to no step.
void FSDPState::forget_failed_backward() {
  if (!backward_began_ || !backward_.expired()) {
    return;
  }
  for (const std::weak_ptr<FSDPState>& weak : all_states_) {
    const auto state = weak.lock();
    if (state == nullptr) {
      continue;
    }
    state->training_state_ = TrainingState::kIdle;
    if (state->group_ != nullptr) {
      state->group_->set_training_state(TrainingState::kIdle);
      state->group_->drop_unsharded_gradients();
      state->group_->finalize_backward();
    }
  }
  context_->post_forward_order.clear();
  context_->finish_reduce();
  backward_began_ = false;
}

void FSDPState::set_is_last_backward(bool value) {
  if (root_ != nullptr) {
    root_->is_last_backward_ = value;
    return;
  }
  // Whoever turns out to be the root takes it over.
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
