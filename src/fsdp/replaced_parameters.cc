// What became of the parameters outside of training: other tensors, dtypes, memory or devices.
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "src/dtensor/dtensor.h"
#include "src/fsdp/param_group.h"
#include "src/nn/module.h"
#include "src/nn/to_empty.h"

namespace ppfsdp::fsdp {

bool FSDPParamGroup::parameters_were_replaced() const {
  return std::any_of(params_.begin(), params_.end(), [&](const FSDPParam& param) {
    const at::Tensor& local = dtensor::local_of(param.sharded);
    return !local.storage().is_alias_of(flat_shards_.storage()) ||
           local.scalar_type() != param.dtype;
  });
}

// What a rank sends past the ends of its shards is zero.
void FSDPParamGroup::zero_padding() const {
  const auto unit = static_cast<int64_t>(c10::elementSize(shard_dtype_));
  int64_t end = 0;
  for (size_t i = 0; i < params_.size(); ++i) {
    const ParamExtent& extent = shard_layout_.params[i];
    const at::Tensor& local = dtensor::local_of(params_[i].sharded);
    const auto used = static_cast<int64_t>(local.nbytes()) / unit;
    flat_shards_.narrow(0, extent.offset + used, extent.chunk - used).zero_();
    end = std::max(end, extent.offset + extent.chunk);
  }
  flat_shards_.narrow(0, end, shard_layout_.part - end).zero_();
}

void FSDPParamGroup::lay_out_shards(c10::Device device, bool keep_values) {
  const c10::InferenceMode no_inference(false);
  const c10::NoGradGuard no_grad;
  drop_unused_all_gather();
  if (state_ != State::kSharded) {
    to_sharded();
  }
  for (FSDPParam& param : params_) {
    param.dtype = dtensor::local_of(param.sharded).scalar_type();
  }
  set_layouts();
  const at::TensorOptions options = at::TensorOptions(shard_dtype_).device(device);
  flat_shards_ = keep_values
                     ? at::zeros({shard_layout_.part}, options)
                     : nn::uninitialized({shard_layout_.part}, {1}, options, &mesh_->runtime());
  for (size_t i = 0; i < params_.size(); ++i) {
    FSDPParam& param = params_[i];
    const at::Tensor view = local_view(i);
    if (keep_values) {
      view.copy_(dtensor::local_of(param.sharded));
    }
    nn::replace_data(param.sharded, dtensor::from_local(view, mesh_, {dtensor::Placement::shard(0)},
                                                        at::IntArrayRef(param.sizes)));
    param.unsharded.reset();
  }
  if (!keep_values) {
    zero_padding();
  }
}

// After Module::to(dtype), set_data and the like the parameters live elsewhere: lay them out anew.
void FSDPParamGroup::adopt_replaced_parameters() {
  const c10::Device device = dtensor::local_of(params_.front().sharded).device();
  for (const FSDPParam& param : params_) {
    TORCH_CHECK(!param.unsharded.defined() || !param.unsharded.grad().defined(),
                "fully_shard: parameter '", param.fqn,
                "' was replaced (Module::to, set_data) while unsharded gradients wait for their "
                "reduction; replace it after a backward that synchronises gradients");
    TORCH_CHECK(param.sharded.device() == device, "fully_shard: parameter '", params_.front().fqn,
                "' is on ", device, ", '", param.fqn, "' on ", param.sharded.device(),
                "; move all parameters of a group, with nn::to_empty(model, device) off meta");
  }
  lay_out_shards(device, /*keep_values=*/true);
  if (context_ != nullptr) {
    context_->all_gathers_wait(context_->runtime.compute_stream().record());
  }
}

// What the module has registered is what the optimizer was made from.
void FSDPParamGroup::adopt_registered_parameters(const std::string& module_fqn) {
  for (FSDPParam& param : params_) {
    const std::string fqn = nn::join_path(module_fqn, param.fqn);
    const at::Tensor before = param.sharded;
    at::Tensor now;
    for (const Registration& registration : param.registrations) {
      const at::Tensor entry = registration.module->named_parameters(
          /*recurse=*/false, /*remove_duplicates=*/false)[registration.name];
      TORCH_CHECK(!now.defined() || entry.is_same(now), "fully_shard: parameter '", fqn,
                  "' was tied under ", param.registrations.size(),
                  " names, of which some have been given another tensor since; replace it under "
                  "all of them");
      now = entry;
    }
    if (now.is_same(before)) {
      continue;
    }
    const bool fits =
        dtensor::is_dtensor(now) && now.sizes() == at::IntArrayRef(param.sizes) &&
        dtensor::same_mesh(dtensor::spec_of(now)->mesh, mesh_) &&
        dtensor::spec_of(now)->placements == dtensor::Placements{dtensor::Placement::shard(0)};
    TORCH_CHECK(fits, "fully_shard: parameter '", fqn, "' has been replaced by a ",
                dtensor::is_dtensor(now) ? "DTensor " + dtensor::spec_of(now)->str()
                                         : c10::str("plain tensor of sizes ", now.sizes()),
                "; copy values into the sharded parameter, or register a DTensor of sizes ",
                at::IntArrayRef(param.sizes), " in [Shard(0)] on ", mesh_->str());
    drop_unused_all_gather();
    if (state_ != State::kSharded) {
      to_sharded();
    }
    param.sharded = now;
    for (const Registration& registration : param.registrations) {
      *registration.slot = now;
    }
  }
}

void FSDPParamGroup::check_parameters(const std::string& module_fqn) {
  adopt_registered_parameters(module_fqn);
  if (parameters_were_replaced()) {
    adopt_replaced_parameters();
  }
  const FSDPParam* first = nullptr;
  for (const FSDPParam& param : params_) {
    if (!param.sharded.requires_grad()) {
      continue;
    }
    first = first == nullptr ? &param : first;
    TORCH_CHECK(param.dtype == first->dtype, "fully_shard: the trainable parameters of '",
                module_fqn, "' must have one dtype, since one reduce-scatter reduces them; '",
                nn::join_path(module_fqn, first->fqn), "' has ", first->dtype, ", '",
                nn::join_path(module_fqn, param.fqn), "' has ", param.dtype);
  }
}

std::vector<at::Tensor> FSDPParamGroup::to_empty(c10::Device device) {
  const c10::Device own = mesh_->runtime().device();
  TORCH_CHECK(device.is_meta() || (device.type() == own.type() &&
                                   (!device.has_index() || device.index() == own.index())),
              "to_empty: the parameters are sharded over ranks that compute on ", own,
              ", so their shards cannot be on ", device);
  drop_unsharded_gradients();
  lay_out_shards(device.is_meta() ? device : own, /*keep_values=*/false);
  std::vector<at::Tensor> tensors;
  for (const FSDPParam& param : params_) {
    tensors.push_back(param.sharded);
  }
  return tensors;
}

}  // namespace ppfsdp::fsdp
