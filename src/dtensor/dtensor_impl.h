#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include "src/dtensor/spec.h"

namespace ppfsdp::dtensor {

/// The TensorImpl of a DTensor: global sizes, strides, dtype and device, no storage, and this
/// rank's part inside.
///
/// Its key set is {Fake, the device's autocast key} on the Meta backend. LibTorch registers nothing
/// for Fake, which stands below autograd and above the backends, so every op ends in our fallback
/// (dispatch.cc) after autograd has done its work. The Meta bit makes at::isTensorSubclassLike
/// true, so LibTorch's gradient formulas take their out-of-place forms and never mix plain buffers
/// with DTensors; device() stays the real one.
class DTensorImpl final : public c10::TensorImpl {
 public:
  /// `local` must not require grad and must have spec->local_sizes.
  DTensorImpl(at::Tensor local, SpecPtr spec);

  const at::Tensor& local() const { return local_; }
  const SpecPtr& spec() const { return spec_; }

  /// Makes the version counter that of the local part, so that a write to either shows in both.
  void share_local_version();
  /// Counts a write. `counted`: LibTorch has done so for this tensor, though not for the local
  /// part.
  void note_write(bool counted) {
    if (!counted && !is_inference()) {
      bump_version();
    }
    if (!shares_version_ && !local_.is_inference()) {
      local_.unsafeGetTensorImpl()->bump_version();
    }
  }

  /// What remember_whole was given; undefined when it was given nothing, or when that or the local
  /// part has been written to since.
  at::Tensor remembered_whole() const;
  /// Keeps the reduced value of a Partial without dims (a loss, a norm), which ops often ask for
  /// one after another: it is reduced once.
  void remember_whole(const at::Tensor& whole) const;

  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(
      const c10::VariableVersion& version_counter,
      bool allow_tensor_metadata_change) const override;
  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(
      c10::VariableVersion&& version_counter, bool allow_tensor_metadata_change) const override;
  void shallow_copy_from(const c10::intrusive_ptr<c10::TensorImpl>& impl) override;
  void release_resources() override;
  /// There is none, and to ask is an error: but on a GPU, within backward, that of the local part.
  /// Where a gradient goes from one stream to another, LibTorch asks whose memory it is.
  const c10::Storage& storage() const override;

 protected:
  const char* tensorimpl_type_name() const override { return "ppfsdp::dtensor::DTensorImpl"; }

 private:
  at::Tensor local_;
  SpecPtr spec_;
  bool shares_version_ = false;
  mutable at::Tensor whole_;
  mutable int64_t whole_versions_ = 0;
};

/// The tensor's DTensorImpl, or null when it is not a DTensor.
inline const DTensorImpl* impl_of(const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return impl->key_set().has(c10::DispatchKey::Fake) ? static_cast<const DTensorImpl*>(impl)
                                                     : nullptr;
}

/// A DTensor without autograd history. Throws when `local` has not spec->local_sizes.
at::Tensor make_dtensor(at::Tensor local, SpecPtr spec);

}  // namespace ppfsdp::dtensor
