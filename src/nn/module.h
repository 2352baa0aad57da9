#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/ordered_dict.h>

#include <array>
#include <concepts>
#include <cstddef>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ppfsdp::nn {

class Module;
using ModulePtr = std::shared_ptr<Module>;

/// What another library attaches to a module (fully_shard's state, a checkpoint wrapper's).
class ModuleExtension {
 public:
  virtual ~ModuleExtension() = default;

  /// nn::to_empty has reached the module: gives those parameters whose memory the extension lays
  /// out new memory on `device`, without values, and returns them.
  virtual std::vector<at::Tensor> to_empty(c10::Device /*device*/) { return {}; }
};

/// torch::nn::Module with what per-parameter sharding needs: parameter slots and forward hooks.
///
/// A slot is a member `at::Tensor` that forward reads. The registered entry (what parameters(),
/// optimizers and checkpoints see) and the slot start as one tensor; fully_shard replaces the entry
/// by the sharded parameter and points the slot at the unsharded one for the time of use.
class Module : public torch::nn::Module {
 public:
  using TensorRefs = std::vector<at::Tensor*>;
  using NamedTensors = torch::OrderedDict<std::string, at::Tensor>;
  /// Sees, and may replace, the tensors in the arguments of forward. The caller's own variables
  /// keep their values.
  using ForwardPreHook = std::function<void(Module& module, const TensorRefs& inputs)>;
  /// Sees, and may replace, the tensors in the result of forward.
  using ForwardHook = std::function<void(Module& module, const TensorRefs& outputs)>;
  /// Learns that forward, or one of its hooks, has thrown. Throws nothing itself.
  using ForwardErrorHook = std::function<void(Module& module)>;

  using torch::nn::Module::Module;
  /// A copy's slots would be the original's members.
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  /// Registers `value` under `name` and makes `slot` (a member of this module) its reader. Assigns
  /// `value` to `slot` and returns it. A tensor registered in several modules, or under several
  /// names, is one (tied) parameter: each name has its own slot. Throws for an undefined value, a
  /// name in use, a slot that another name of this module has.
  at::Tensor& register_parameter(std::string name, at::Tensor& slot, at::Tensor value,
                                 bool requires_grad = true);
  /// Likewise for a buffer. A buffer that is not persistent can be recomputed and is left out of
  /// checkpoints.
  at::Tensor& register_buffer(std::string name, at::Tensor& slot, at::Tensor value,
                              bool persistent = true);

  /// Parameters by name in the order of registration, a module's own before its children's. A tied
  /// parameter appears once, under its first name, unless `remove_duplicates` is false.
  /// (torch::nn::Module's function of this name lists it under every name.)
  NamedTensors named_parameters(bool recurse = true, bool remove_duplicates = true) const;
  /// The values of named_parameters(recurse).
  std::vector<at::Tensor> parameters(bool recurse = true) const;

  /// The slot of this module's own parameter or buffer `name`; null when there is none.
  at::Tensor* slot(const std::string& name) const;
  /// Whether this module's own buffer `name` belongs into checkpoints; an error for other names.
  bool is_buffer_persistent(const std::string& name) const;
  /// Replaces the registered entry of this module's own parameter and leaves its slot alone.
  void set_registered_parameter(const std::string& name, at::Tensor value);
  /// Replaces entry and slot of this module's own buffer.
  void set_registered_buffer(const std::string& name, at::Tensor value);

  /// Gives this module's own parameters and buffers their initial values in place, with the default
  /// generator. It acts on the registered entries, which under fully_shard are the sharded
  /// parameters. A module with parameters or buffers overrides it: the default throws for one.
  virtual void reset_parameters();

  /// Hooks run in the order of registration; those with `prepend` before all others. A hook that is
  /// registered from inside a hook of the same kind and not prepended runs in the same call.
  void register_forward_pre_hook(ForwardPreHook hook, bool prepend = false);
  void register_forward_hook(ForwardHook hook, bool prepend = false);
  void register_forward_error_hook(ForwardErrorHook hook);
  bool has_forward_hooks() const {
    return !pre_hooks_.empty() || !hooks_.empty() || !error_hooks_.empty();
  }
  void run_forward_pre_hooks(const TensorRefs& inputs);
  void run_forward_hooks(const TensorRefs& outputs);
  void run_forward_error_hooks();

  /// One extension a key ("fsdp"); null removes it.
  void set_extension(const std::string& key, std::shared_ptr<ModuleExtension> extension);
  /// Null when there is none.
  ModuleExtension* extension(const std::string& key) const;
  const std::map<std::string, std::shared_ptr<ModuleExtension>>& extensions() const {
    return extensions_;
  }

 private:
  void check_registration(const char* function, const std::string& name, const at::Tensor& slot,
                          const at::Tensor& value) const;

  std::map<std::string, at::Tensor*> slots_;
  std::map<std::string, bool> buffer_persistent_;
  // Lists: a hook may register another while it runs.
  std::list<ForwardPreHook> pre_hooks_;
  std::list<ForwardHook> hooks_;
  std::list<ForwardErrorHook> error_hooks_;
  std::map<std::string, std::shared_ptr<ModuleExtension>> extensions_;
};

/// Calls `visit` once for each module below `root` and for itself, children before the module that
/// holds them, in the order of registration. `path` is the module's name below `root`, empty for
/// the root.
void visit_modules(
    torch::nn::Module& root,
    const std::function<void(const std::string& path, torch::nn::Module& module)>& visit);

/// "path.name", or "name" below the root, whose path is empty.
std::string join_path(const std::string& path, const std::string& name);

/// reset_parameters of `module` and of every module below it, once each, in the order of
/// visit_modules. That is the order of constructors which make their children and then call
/// reset_parameters, so that from one generator a model that was materialised by to_empty gets the
/// values of one that was built on its device. A module that has parameters or buffers and no
/// reset_parameters is an error that names it.
void reset_all_parameters(Module& module);

namespace internal {

template <typename T>
concept CollectsItself = requires(T& value, Module::TensorRefs& out) {
  value.collect_tensors(out);
};

/// Whether a T can hold tensors that collect_tensors finds.
template <typename T>
struct HoldsTensors : std::bool_constant<std::derived_from<T, at::Tensor> || CollectsItself<T>> {};
template <typename T>
struct HoldsTensors<std::optional<T>> : HoldsTensors<T> {};
template <typename T, typename A>
struct HoldsTensors<std::vector<T, A>> : HoldsTensors<T> {};
template <typename T, std::size_t n>
struct HoldsTensors<std::array<T, n>> : HoldsTensors<T> {};
template <typename K, typename T, typename C, typename A>
struct HoldsTensors<std::map<K, T, C, A>> : HoldsTensors<T> {};
template <typename K, typename T, typename H, typename E, typename A>
struct HoldsTensors<std::unordered_map<K, T, H, E, A>> : HoldsTensors<T> {};
template <typename T, typename U>
struct HoldsTensors<std::pair<T, U>> : std::disjunction<HoldsTensors<T>, HoldsTensors<U>> {};
template <typename... Ts>
struct HoldsTensors<std::tuple<Ts...>> : std::disjunction<HoldsTensors<Ts>...> {};

template <typename T>
struct IsTensorArrayRef : std::false_type {};
template <std::derived_from<at::Tensor> T>
struct IsTensorArrayRef<c10::ArrayRef<T>> : std::true_type {};

template <typename T>
void collect(T& value, Module::TensorRefs& out) {
  if constexpr (std::derived_from<T, at::Tensor>) {
    if (value.defined()) out.push_back(&value);
  } else if constexpr (CollectsItself<T>) {
    value.collect_tensors(out);
  }
}
template <typename T>
void collect(std::optional<T>& value, Module::TensorRefs& out);
template <typename T, typename A>
void collect(std::vector<T, A>& values, Module::TensorRefs& out);
template <typename T, std::size_t n>
void collect(std::array<T, n>& values, Module::TensorRefs& out);
template <typename K, typename T, typename C, typename A>
void collect(std::map<K, T, C, A>& values, Module::TensorRefs& out);
template <typename K, typename T, typename H, typename E, typename A>
void collect(std::unordered_map<K, T, H, E, A>& values, Module::TensorRefs& out);
template <typename T, typename U>
void collect(std::pair<T, U>& values, Module::TensorRefs& out);
template <typename... Ts>
void collect(std::tuple<Ts...>& values, Module::TensorRefs& out);

template <typename T>
void collect(std::optional<T>& value, Module::TensorRefs& out) {
  if constexpr (HoldsTensors<T>::value) {
    if (value.has_value()) collect(*value, out);
  }
}
template <typename T, typename A>
void collect(std::vector<T, A>& values, Module::TensorRefs& out) {
  if constexpr (HoldsTensors<T>::value) {
    for (T& value : values) collect(value, out);
  }
}
template <typename T, std::size_t n>
void collect(std::array<T, n>& values, Module::TensorRefs& out) {
  if constexpr (HoldsTensors<T>::value) {
    for (T& value : values) collect(value, out);
  }
}
template <typename K, typename T, typename C, typename A>
void collect(std::map<K, T, C, A>& values, Module::TensorRefs& out) {
  if constexpr (HoldsTensors<T>::value) {
    for (auto& [key, value] : values) collect(value, out);
  }
}
template <typename K, typename T, typename H, typename E, typename A>
void collect(std::unordered_map<K, T, H, E, A>& values, Module::TensorRefs& out) {
  if constexpr (HoldsTensors<T>::value) {
    for (auto& [key, value] : values) collect(value, out);
  }
}
template <typename T, typename U>
void collect(std::pair<T, U>& values, Module::TensorRefs& out) {
  collect(values.first, out);
  collect(values.second, out);
}
template <typename... Ts>
void collect(std::tuple<Ts...>& values, Module::TensorRefs& out) {
  std::apply([&out](auto&... value) { (collect(value, out), ...); }, values);
}

/// An argument of forward while hooks run: a handle copy if it holds tensors (so that a hook
/// replaces the argument and not the caller's variable), the caller's object otherwise.
template <typename Arg>
using HeldArgument = std::conditional_t<HoldsTensors<std::remove_cvref_t<Arg>>::value,
                                        std::remove_cvref_t<Arg>, Arg&&>;

/// Whether Impl's forward takes argument `i` of these by non-const reference though it holds
/// tensors: a const one, otherwise alike, will not do.
template <typename Impl, std::size_t i, typename... Args, std::size_t... j>
constexpr bool writes_argument(std::index_sequence<j...>) {
  using Arg = std::tuple_element_t<i, std::tuple<Args&&...>>;
  if constexpr (std::is_lvalue_reference_v<Arg> && !std::is_const_v<std::remove_reference_t<Arg>> &&
                HoldsTensors<std::remove_cvref_t<Arg>>::value) {
    return !requires(Impl & impl) {
      impl.forward(
          std::declval<std::conditional_t<i == j, const std::remove_cvref_t<Args>&, Args&&>>()...);
    };
  } else {
    return false;
  }
}

/// The same of any argument.
template <typename Impl, typename... Args>
constexpr bool writes_arguments() {
  return []<std::size_t... i>(std::index_sequence<i...> all) {
    return (writes_argument<Impl, i, Args...>(all) || ...);
  }
  (std::index_sequence_for<Args...>());
}

}  // namespace internal

/// Appends the addresses of the defined tensors in `value`: tensors, optionals, vectors, arrays,
/// maps' values, pairs and tuples of them, at any depth, and whatever a class with a member
/// `collect_tensors(TensorRefs&)` appends. Other types are passed over.
template <typename T>
void collect_tensors(T& value, Module::TensorRefs& out) {
  internal::collect(value, out);
}

/// Owner of a module implementation, as torch::nn::ModuleHolder, whose operator() runs the forward
/// hooks round `impl->forward(args...)`. Calling `impl->forward` directly bypasses them. A result
/// that forward returns by reference is returned by value.
template <typename Impl>
class ModuleHolder : public torch::nn::ModuleHolder<Impl> {
 public:
  using torch::nn::ModuleHolder<Impl>::ModuleHolder;

  template <typename... Args>
  auto operator()(Args&&... args)
      -> std::remove_cvref_t<decltype(std::declval<Impl&>().forward(std::forward<Args>(args)...))> {
    static_assert(!(internal::IsTensorArrayRef<std::remove_cvref_t<Args>>::value || ...),
                  "hooks can't replace the tensors of an ArrayRef: pass a std::vector<at::Tensor>");
    static_assert(
        !internal::writes_arguments<Impl, Args...>(),
        "forward takes tensors by non-const reference: when there are hooks that is a "
        "copy, and what forward writes to it would be lost; return the tensors, or pass a "
        "pointer");
    Impl& impl = *this->get();
    if (!impl.has_forward_hooks()) return impl.forward(std::forward<Args>(args)...);
    return forward_with_hooks(impl, std::index_sequence_for<Args...>(),
                              std::forward<Args>(args)...);
  }

 private:
  template <std::size_t... i, typename... Args>
  static auto forward_with_hooks(Impl& impl, std::index_sequence<i...>, Args&&... args)
      -> std::remove_cvref_t<decltype(impl.forward(std::forward<Args>(args)...))> {
    using Result = std::remove_cvref_t<decltype(impl.forward(std::forward<Args>(args)...))>;
    try {
      std::tuple<internal::HeldArgument<Args>...> held(std::forward<Args>(args)...);
      Module::TensorRefs inputs;
      (collect_tensors(std::get<i>(held), inputs), ...);
      impl.run_forward_pre_hooks(inputs);
      if constexpr (std::is_void_v<Result>) {
        impl.forward(static_cast<Args&&>(std::get<i>(held))...);
        impl.run_forward_hooks({});
      } else {
        Result result = impl.forward(static_cast<Args&&>(std::get<i>(held))...);
        Module::TensorRefs outputs;
        collect_tensors(result, outputs);
        impl.run_forward_hooks(outputs);
        return result;
      }
    } catch (...) {
      impl.run_forward_error_hooks();
      throw;
    }
  }
};

}  // namespace ppfsdp::nn

/// Defines `Name` as the holder of `NameImpl`, as TORCH_MODULE does.
#define PPFSDP_MODULE(Name)                                     \
  class Name : public ::ppfsdp::nn::ModuleHolder<Name##Impl> {  \
   public:                                                      \
    using ::ppfsdp::nn::ModuleHolder<Name##Impl>::ModuleHolder; \
    using Impl [[maybe_unused]] = Name##Impl;                   \
  }
