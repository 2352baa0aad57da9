#include "src/dtensor/dtensor_impl.h"

#include <c10/core/AutogradState.h>
#include <c10/core/DispatchKeySet.h>
#include <torch/csrc/autograd/graph_task.h>

namespace ppfsdp::dtensor {
namespace {

c10::DispatchKeySet key_set_for(const at::Tensor& local) {
  // The autocast key of the device on which the local ops run; the constructor of TensorImpl would
  // derive it from the backend bit, which here is Meta and has none.
  return c10::DispatchKeySet(c10::DispatchKey::Fake) |
         c10::DispatchKeySet(c10::BackendComponent::MetaBit) |
         c10::getAutocastRelatedKeySetFromBackend(local.key_set().highestBackendKey());
}

}  // namespace

DTensorImpl::DTensorImpl(at::Tensor local, SpecPtr spec)
    : c10::TensorImpl(key_set_for(local), c10::scalarTypeToTypeMeta(spec->dtype), local.device()),
      local_(std::move(local)),
      spec_(std::move(spec)) {
  set_sizes_and_strides(spec_->sizes, spec_->strides);
  // There is none; LibTorch's serialiser would take a null storage for one and crash.
  set_storage_access_should_throw();
}

void DTensorImpl::share_local_version() {
  if (!local_.is_inference() && !is_inference()) {
    set_version_counter(local_.unsafeGetTensorImpl()->version_counter());
    shares_version_ = true;
  }
}

at::Tensor DTensorImpl::remembered_whole() const {
  const bool fresh = whole_.defined() && whole_versions_ == whole_._version() + local_._version();
  return fresh ? whole_ : at::Tensor();
}

void DTensorImpl::remember_whole(const at::Tensor& whole) const {
  if (whole.is_inference() || local_.is_inference()) return;  // their writes are not counted
  whole_ = whole;
  whole_versions_ = whole._version() + local_._version();
}

c10::intrusive_ptr<c10::TensorImpl> DTensorImpl::shallow_copy_and_detach(
    const c10::VariableVersion& version_counter, bool allow_tensor_metadata_change) const {
  auto impl = c10::make_intrusive<DTensorImpl>(local_, spec_);
  copy_tensor_metadata(this, impl.get(), version_counter, allow_tensor_metadata_change);
  return impl;
}

c10::intrusive_ptr<c10::TensorImpl> DTensorImpl::shallow_copy_and_detach(
    c10::VariableVersion&& version_counter, bool allow_tensor_metadata_change) const {
  auto impl = c10::make_intrusive<DTensorImpl>(local_, spec_);
  copy_tensor_metadata(this, impl.get(), std::move(version_counter), allow_tensor_metadata_change);
  return impl;
}

void DTensorImpl::shallow_copy_from(const c10::intrusive_ptr<c10::TensorImpl>& impl) {
  TORCH_CHECK(
      impl->key_set().has(c10::DispatchKey::Fake),
      "set_data: a DTensor can only take the data of a DTensor, got a plain tensor of sizes ",
      impl->sizes());
  const auto* source = static_cast<const DTensorImpl*>(impl.get());
  copy_tensor_metadata(source, this, version_counter(), allow_tensor_metadata_change());
  local_ = source->local_;
  spec_ = source->spec_;
  shares_version_ = false;
  whole_.reset();
}

const c10::Storage& DTensorImpl::storage() const {
  const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
  return in_backward && !local_.is_cpu() ? local_.storage() : c10::TensorImpl::storage();
}

void DTensorImpl::release_resources() {
  c10::TensorImpl::release_resources();
  local_.reset();
  whole_.reset();
  spec_.reset();
}

at::Tensor make_dtensor(at::Tensor local, SpecPtr spec) {
  TORCH_CHECK(local.sizes() == c10::IntArrayRef(spec->local_sizes), "DTensor: this rank's part of ",
              spec->str(), " has sizes ", c10::IntArrayRef(spec->local_sizes), ", got ",
              local.sizes());
  // An in-place write to a view under autograd must replay the view and not use as_strided, whose
  // strides would be the global ones. The switch is one of the thread.
  c10::AutogradState::get_tls_state().set_view_replay_enabled(true);
  return at::Tensor(c10::make_intrusive<DTensorImpl>(std::move(local), std::move(spec)));
}

}  // namespace ppfsdp::dtensor
