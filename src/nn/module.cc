#include "src/nn/module.h"

#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>

#include <unordered_set>

namespace ppfsdp::nn {
namespace {

// torch::nn::Module keeps its buffers private and has no function that replaces one. set_data would
// do for a move between two real devices, not for one off the meta device. The language lets an
// explicit instantiation name a private member; this makes a function of it.
using Buffers = torch::OrderedDict<std::string, at::Tensor>;
Buffers& buffers_of(torch::nn::Module& module);

template <Buffers torch::nn::Module::*member>
struct BuffersAccess {
  friend Buffers& buffers_of(torch::nn::Module& module) { return module.*member; }
};
template struct BuffersAccess<&torch::nn::Module::buffers_>;

}  // namespace

void Module::check_registration(const char* function, const std::string& name,
                                const at::Tensor& slot, const at::Tensor& value) const {
  TORCH_CHECK(value.defined(), function, "('", name, "') of ", this->name(),
              ": the value is an undefined tensor; leave what is unused unregistered");
  for (const auto& [other, address] : slots_) {
    TORCH_CHECK(address != &slot, function, "('", name, "') of ", this->name(),
                ": the slot is already that of '", other, "'; each name needs a member of its own");
  }
}

at::Tensor& Module::register_parameter(std::string name, at::Tensor& slot, at::Tensor value,
                                       bool requires_grad) {
  check_registration("register_parameter", name, slot, value);
  // The base class refuses a bad or used name, before anything here has changed.
  torch::nn::Module::register_parameter(name, value, requires_grad);
  slots_.emplace(std::move(name), &slot);
  slot = std::move(value);
  return slot;
}

at::Tensor& Module::register_buffer(std::string name, at::Tensor& slot, at::Tensor value,
                                    bool persistent) {
  check_registration("register_buffer", name, slot, value);
  torch::nn::Module::register_buffer(name, value);
  slots_.emplace(name, &slot);
  buffer_persistent_.emplace(std::move(name), persistent);
  slot = std::move(value);
  return slot;
}

Module::NamedTensors Module::named_parameters(bool recurse, bool remove_duplicates) const {
  NamedTensors all = torch::nn::Module::named_parameters(recurse);
  if (!remove_duplicates) return all;
  NamedTensors result;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (auto& item : all) {
    if (seen.insert(item.value().unsafeGetTensorImpl()).second) {
      result.insert(item.key(), std::move(item.value()));
    }
  }
  return result;
}

std::vector<at::Tensor> Module::parameters(bool recurse) const {
  return named_parameters(recurse).values();
}

at::Tensor* Module::slot(const std::string& name) const {
  const auto found = slots_.find(name);
  return found == slots_.end() ? nullptr : found->second;
}

bool Module::is_buffer_persistent(const std::string& name) const {
  const auto found = buffer_persistent_.find(name);
  TORCH_CHECK(found != buffer_persistent_.end(), "is_buffer_persistent: ", this->name(),
              " has no buffer of its own called '", name, "'");
  return found->second;
}

void Module::set_registered_parameter(const std::string& name, at::Tensor value) {
  at::Tensor* entry = parameters_.find(name);
  TORCH_CHECK(entry != nullptr, "set_registered_parameter: ", this->name(),
              " has no parameter of its own called '", name, "'");
  TORCH_CHECK(value.defined(), "set_registered_parameter('", name, "') of ", this->name(),
              ": the value is an undefined tensor");
  *entry = std::move(value);
}

void Module::set_registered_buffer(const std::string& name, at::Tensor value) {
  at::Tensor* entry = buffers_of(*this).find(name);
  TORCH_CHECK(entry != nullptr, "set_registered_buffer: ", this->name(),
              " has no buffer of its own called '", name, "'");
  TORCH_CHECK(value.defined(), "set_registered_buffer('", name, "') of ", this->name(),
              ": the value is an undefined tensor");
  if (at::Tensor* reader = slot(name)) *reader = value;
  *entry = std::move(value);
}

void Module::register_forward_pre_hook(ForwardPreHook hook, bool prepend) {
  TORCH_CHECK(hook, "register_forward_pre_hook of ", name(), ": the hook is empty");
  pre_hooks_.insert(prepend ? pre_hooks_.begin() : pre_hooks_.end(), std::move(hook));
}

void Module::register_forward_hook(ForwardHook hook, bool prepend) {
  TORCH_CHECK(hook, "register_forward_hook of ", name(), ": the hook is empty");
  hooks_.insert(prepend ? hooks_.begin() : hooks_.end(), std::move(hook));
}

void Module::register_forward_error_hook(ForwardErrorHook hook) {
  TORCH_CHECK(hook, "register_forward_error_hook of ", name(), ": the hook is empty");
  error_hooks_.push_back(std::move(hook));
}

void Module::run_forward_pre_hooks(const TensorRefs& inputs) {
  for (const ForwardPreHook& hook : pre_hooks_) hook(*this, inputs);
}

void Module::run_forward_hooks(const TensorRefs& outputs) {
  for (const ForwardHook& hook : hooks_) hook(*this, outputs);
}

void Module::run_forward_error_hooks() {
  for (const ForwardErrorHook& hook : error_hooks_) hook(*this);
}

void Module::set_extension(const std::string& key, std::shared_ptr<ModuleExtension> extension) {
  if (extension == nullptr) {
    extensions_.erase(key);
  } else {
    extensions_[key] = std::move(extension);
  }
}

ModuleExtension* Module::extension(const std::string& key) const {
  const auto found = extensions_.find(key);
  return found == extensions_.end() ? nullptr : found->second.get();
}

void Module::reset_parameters() {
  TORCH_CHECK(parameters_.is_empty() && named_buffers(/*recurse=*/false).is_empty(),
              "reset_parameters: ", name(),
              " has parameters or buffers of its own and does not say how they get their initial "
              "values; override reset_parameters() in it");
}

std::string join_path(const std::string& path, const std::string& name) {
  return path.empty() ? name : path + "." + name;
}

namespace {

using Visit = std::function<void(const std::string& path, torch::nn::Module& module)>;

void visit_below(torch::nn::Module& module, const std::string& path,
                 std::unordered_set<const torch::nn::Module*>& seen, const Visit& visit) {
  if (!seen.insert(&module).second) return;
  for (const auto& child : module.named_children()) {
    visit_below(*child.value(), join_path(path, child.key()), seen, visit);
  }
  visit(path, module);
}

}  // namespace

void visit_modules(torch::nn::Module& root, const Visit& visit) {
  std::unordered_set<const torch::nn::Module*> seen;
  visit_below(root, "", seen, visit);
}

void reset_all_parameters(Module& module) {
  visit_modules(module, [](const std::string& path, torch::nn::Module& each) {
    const std::string place = path.empty() ? "the root module" : "module '" + path + "'";
    if (auto* own = dynamic_cast<Module*>(&each)) {
      try {
        own->reset_parameters();
      } catch (c10::Error& error) {
        error.add_context("while resetting " + place);
        throw;
      }
      return;
    }
    TORCH_CHECK(each.named_parameters(/*recurse=*/false).is_empty() &&
                    each.named_buffers(/*recurse=*/false).is_empty(),
                "reset_all_parameters: ", place, " is a ", each.name(),
                " and has parameters or buffers, but only a ppfsdp::nn::Module says how they get "
                "their initial values");
  });
}

}  // namespace ppfsdp::nn
