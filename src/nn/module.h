#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace ppfsdp::nn {

class Module;
using ModulePtr = std::shared_ptr<Module>;

/// What another library attaches to a module (fully_shard's state, a checkpoint wrapper's).
class ModuleExtension {
 public:
  virtual ~ModuleExtension() = default;
};

/// torch::nn::Module with what per-parameter sharding needs: parameter slots and forward hooks.
///
/// A slot is a member `at::Tensor` that forward reads. The registered entry (what parameters(),
/// optimizers and checkpoints see) and the slot start as one tensor; fully_shard replaces the entry
/// by the sharded parameter and points the slot at the unsharded one for the time of use.
class Module : public torch::nn::Module {
 public:
  using TensorRefs = std::vector<at::Tensor*>;
  /// Sees, and may replace, the tensors in the arguments of forward.
  using ForwardPreHook = std::function<void(Module& module, const TensorRefs& inputs)>;
  /// Sees, and may replace, the tensors in the result of forward.
  using ForwardHook = std::function<void(Module& module, const TensorRefs& outputs)>;

  using torch::nn::Module::Module;

  /// Registers `value` under `name` and makes `slot` (a member of this module) its reader. Assigns
  /// `value` to `slot`. A tensor registered in several modules is one (tied) parameter.
  at::Tensor& register_parameter(std::string name, at::Tensor& slot, at::Tensor value,
                                 bool requires_grad = true);
  /// Likewise for a buffer. A buffer that is not persistent can be recomputed and is left out of
  /// checkpoints.
  at::Tensor& register_buffer(std::string name, at::Tensor& slot, at::Tensor value,
                              bool persistent = true);

  /// The slot of this module's own parameter or buffer `name`; null when it was registered without.
  at::Tensor* slot(const std::string& name) const;
  /// Replaces the registered entry of this module's own parameter and leaves its slot alone.
  void set_registered_parameter(const std::string& name, at::Tensor value);
  /// Replaces entry and slot of this module's own buffer.
  void set_registered_buffer(const std::string& name, at::Tensor value);

  /// Gives this module's own parameters and buffers their initial values in place, with the default
  /// generator; a module with parameters or buffers overrides it.
  virtual void reset_parameters() {}

  /// Hooks run in the order of registration; those with `prepend` before all others.
  void register_forward_pre_hook(ForwardPreHook hook, bool prepend = false);
  void register_forward_hook(ForwardHook hook, bool prepend = false);
  bool has_forward_hooks() const { return !pre_hooks_.empty() || !hooks_.empty(); }
  void run_forward_pre_hooks(const TensorRefs& inputs);
  void run_forward_hooks(const TensorRefs& outputs);

  /// One extension a key ("fsdp").
  void set_extension(const std::string& key, std::shared_ptr<ModuleExtension> extension);
  ModuleExtension* extension(const std::string& key) const;

 private:
  std::map<std::string, at::Tensor*> slots_;
  std::map<std::string, bool> buffer_persistent_;
  std::vector<ForwardPreHook> pre_hooks_;
  std::vector<ForwardHook> hooks_;
  std::map<std::string, std::shared_ptr<ModuleExtension>> extensions_;
};

/// Appends the addresses of the tensors in `value`: tensors, optionals, vectors, pairs, tuples and
/// arrays of them, at any depth. Other types are passed over.
template <typename T>
void collect_tensors(T& value, Module::TensorRefs& out);

/// Owner of a module implementation, as torch::nn::ModuleHolder, whose operator() runs the forward
/// hooks round `impl->forward(args...)`. Calling `impl->forward` directly bypasses them.
template <typename Impl>
class ModuleHolder : public torch::nn::ModuleHolder<Impl> {
 public:
  using torch::nn::ModuleHolder<Impl>::ModuleHolder;

  template <typename... Args>
  auto operator()(Args&&... args);
};

}  // namespace ppfsdp::nn

/// Defines `Name` as the holder of `NameImpl`, as TORCH_MODULE does.
#define PPFSDP_MODULE(Name)                                              \
  class Name : public ::ppfsdp::nn::ModuleHolder<Name##Impl> {           \
   public:                                                               \
    using ::ppfsdp::nn::ModuleHolder<Name##Impl>::ModuleHolder;          \
    using Impl [[maybe_unused]] = Name##Impl;                            \
  }
