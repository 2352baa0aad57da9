#include "src/fsdp/fully_shard.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <set>

#include "src/dtensor/dtensor.h"
#include "src/fsdp/param_group.h"
#include "src/fsdp/state.h"
#include "src/nn/module.h"
#include "src/nn/to_empty.h"

namespace ppfsdp::fsdp {
namespace {

FSDPState* state_of(torch::nn::Module& module) {
  auto* ours = dynamic_cast<nn::Module*>(&module);
  return ours == nullptr ? nullptr : dynamic_cast<FSDPState*>(ours->extension("fsdp"));
}

/// Walks the modules that one fully_shard call manages and collects their parameters.
class Collector {
 public:
  std::vector<FSDPParam> collect(torch::nn::Module& root) {
    visit(root, "", /*is_root=*/true);
    for (const FSDPParam& param : params_) {
      for (const auto& [original, owner] : owned_) {
        TORCH_CHECK(original != param.sharded.unsafeGetTensorImpl(), "fully_shard: parameter '",
                    param.fqn, "' is tied to '", owner,
                    "' of a module that is sharded already; tied parameters must be in one group");
      }
    }
    return std::move(params_);
  }

  /// Of the managed modules.
  const std::vector<at::Tensor>& buffers() const { return buffers_; }

 private:
  void visit(torch::nn::Module& module, const std::string& prefix, bool is_root) {
    if (!visited_.insert(&module).second) {
      return;
    }
    if (FSDPState* state = is_root ? nullptr : state_of(module)) {
      remember_owned(*state);
      return;
    }
    auto* ours = dynamic_cast<nn::Module*>(&module);
    const auto own = ours != nullptr ? ours->named_parameters(false, /*remove_duplicates=*/false)
                                     : module.named_parameters(false);
    for (const auto& item : own) {
      add(ours, item.key(), nn::join_path(prefix, item.key()), item.value());
    }
    for (const at::Tensor& buffer : module.buffers(/*recurse=*/false)) {
      buffers_.push_back(buffer);
    }
    for (const auto& child : module.named_children()) {
      visit(*child.value(), nn::join_path(prefix, child.key()), /*is_root=*/false);
    }
  }

  // Everything below a sharded module is owned, by it or by a module below it.
  void remember_owned(FSDPState& nested) {
    for (FSDPState* state : nested.states_below()) {
      if (state->group() == nullptr) {
        continue;
      }
      for (const FSDPParam& param : state->group()->params()) {
        owned_.emplace_back(param.original._unsafe_get_target(), param.fqn);
      }
    }
  }

  void add(nn::Module* module, const std::string& name, const std::string& fqn,
           const at::Tensor& value) {
    if (!value.defined()) {
      return;
    }
    TORCH_CHECK(module != nullptr && module->slot(name) != nullptr, "fully_shard: parameter '", fqn,
                "' has no slot, so its unsharded value could not reach forward; register it with "
                "ppfsdp::nn::Module::register_parameter(name, member, value)");
    TORCH_CHECK(
        !dtensor::is_dtensor(value), "fully_shard: parameter '", fqn,
        "' is a DTensor already; apply fully_shard bottom-up, blocks before the modules that "
        "hold them, and once to each");
    TORCH_CHECK(value.dim() > 0, "fully_shard: parameter '", fqn,
                "' is a scalar, which has no dim to shard; make it a tensor of one element");
    TORCH_CHECK(value.is_contiguous(), "fully_shard: parameter '", fqn, "' of sizes ",
                value.sizes(), " and strides ", value.strides(),
                " is not contiguous; register a contiguous tensor");
    const auto same = std::find_if(params_.begin(), params_.end(), [&](const FSDPParam& param) {
      return param.sharded.is_same(value);
    });
    if (same != params_.end()) {
      same->registrations.push_back({module, name, module->slot(name)});
      return;
    }
    TORCH_CHECK(params_.empty() || params_[0].sharded.is_meta() == value.is_meta(),
                "fully_shard: of one group, parameter '", params_.empty() ? "" : params_[0].fqn,
                "' is on ", params_.empty() ? value.device() : params_[0].sharded.device(),
                " and '", fqn, "' on ", value.device(),
                "; build the whole module on meta, or none of it");
    params_.push_back(
        {.fqn = fqn,
         .registrations = {{module, name, module->slot(name)}},
         .sizes = value.sizes().vec(),
         .sharded = value,
         .unsharded = {},
         .accumulated_grad = {},
         .dtype = value.scalar_type(),
         .compute_dtype = value.scalar_type(),
         .original = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(
             value.getIntrusivePtr())});
  }

  std::vector<FSDPParam> params_;
  std::vector<at::Tensor> buffers_;
  std::set<torch::nn::Module*> visited_;
  std::vector<std::pair<c10::TensorImpl*, std::string>> owned_;
};

void check_policy_dtype(const char* name, const std::optional<at::ScalarType>& dtype) {
  TORCH_CHECK(!dtype.has_value() || at::isFloatingType(*dtype), "fully_shard: mp_policy.", name,
              " must be a floating-point dtype, got ", *dtype);
}

}  // namespace

FSDPModule fully_shard(nn::Module& module, const FullyShardOptions& options) {
  TORCH_CHECK(options.mesh != nullptr, "fully_shard: options.mesh is null; pass a 1D DeviceMesh");
  TORCH_CHECK(options.mesh->ndim() == 1, "fully_shard: the mesh must be 1D, got ",
              options.mesh->str());
  TORCH_CHECK(state_of(module) == nullptr, "fully_shard: module '", module.name(),
              "' is fully sharded already; apply fully_shard once to a module");
  check_policy_dtype("param_dtype", options.mp_policy.param_dtype);
  check_policy_dtype("reduce_dtype", options.mp_policy.reduce_dtype);
  check_policy_dtype("output_dtype", options.mp_policy.output_dtype);
  Collector collector;
  std::vector<FSDPParam> params = collector.collect(module);
  auto group =
      params.empty() ? nullptr : std::make_unique<FSDPParamGroup>(std::move(params), options);
  auto state = std::make_shared<FSDPState>(module, options, std::move(group));
  module.set_extension("fsdp", state);
  state->install_hooks();
  const at::Device device = options.mesh->runtime().device();
  for (const at::Tensor& buffer : collector.buffers()) {
    if (!buffer.is_meta() && buffer.device() != device) {
      nn::replace_data(buffer, buffer.to(device));
    }
  }
  return FSDPModule(state.get());
}

FSDPModule fsdp_module(nn::Module& module) {
  FSDPState* state = state_of(module);
  TORCH_CHECK(state != nullptr, "fsdp_module: fully_shard was not applied to module '",
              module.name(), "'");
  return FSDPModule(state);
}

template <typename F>
void for_each_group(FSDPState& state, bool recurse, F f) {
  for (FSDPState* below : recurse ? state.states_below() : std::vector<FSDPState*>{&state}) {
    if (below->group() != nullptr) {
      f(*below->group());
    }
  }
}

void FSDPModule::set_requires_gradient_sync(bool requires_gradient_sync, bool recurse) {
  for_each_group(*state_, recurse,
                 [&](FSDPParamGroup& group) { group.set_reduce_grads(requires_gradient_sync); });
}

void FSDPModule::set_is_last_backward(bool is_last_backward) {
  state_->set_is_last_backward(is_last_backward);
}

void FSDPModule::set_reshard_after_forward(bool reshard_after_forward, bool recurse) {
  for_each_group(*state_, recurse, [&](FSDPParamGroup& group) {
    group.set_reshard_after_forward(reshard_after_forward);
  });
}

void FSDPModule::set_reshard_after_backward(bool reshard_after_backward, bool recurse) {
  for_each_group(*state_, recurse, [&](FSDPParamGroup& group) {
    group.set_reshard_after_backward(reshard_after_backward);
  });
}

void FSDPModule::set_allocate_memory_from_process_group_for_comm(bool enable) {
  for_each_group(*state_, /*recurse=*/false,
                 [&](FSDPParamGroup& group) { group.set_uses_group_memory(enable); });
}

void FSDPModule::unshard() { state_->unshard(); }

void FSDPModule::reshard() { state_->reshard(); }

}  // namespace ppfsdp::fsdp
