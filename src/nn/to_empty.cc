#include "src/nn/to_empty.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>

#include <string>
#include <unordered_set>
#include <vector>

#include "src/dtensor/dtensor.h"
#include "src/dtensor/dtensor_impl.h"
#include "src/nn/module.h"

namespace ppfsdp::nn {
namespace {

/// Parameters and buffers, each once, and the extensions that may lay out some of them.
struct Tensors {
  std::vector<at::Tensor> all;
  std::vector<ModuleExtension*> extensions;

  void add(torch::nn::Module& module) {
    for (const at::Tensor& parameter : module.parameters(/*recurse=*/false)) add(parameter);
    for (const at::Tensor& buffer : module.buffers(/*recurse=*/false)) add(buffer);
    if (auto* ours = dynamic_cast<Module*>(&module)) {
      for (const auto& [key, extension] : ours->extensions()) extensions.push_back(extension.get());
    }
  }

 private:
  void add(const at::Tensor& tensor) {
    if (tensor.defined() && seen_.insert(tensor.unsafeGetTensorImpl()).second) {
      all.push_back(tensor);
    }
  }

  std::unordered_set<const c10::TensorImpl*> seen_;
};

/// The runtime of a DTensor among them; plain tensors know none.
comm::Runtime* runtime_of(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (dtensor::is_dtensor(tensor)) return &dtensor::spec_of(tensor)->mesh->runtime();
  }
  return nullptr;
}

at::Tensor uninitialized_like(const at::Tensor& tensor, c10::Device device,
                              comm::Runtime* runtime) {
  if (dtensor::is_dtensor(tensor)) {
    return dtensor::make_dtensor(uninitialized_like(dtensor::local_of(tensor), device, runtime),
                                 dtensor::spec_of(tensor));
  }
  TORCH_CHECK(tensor.layout() == at::kStrided, "to_empty: a tensor of sizes ", tensor.sizes(),
              " has layout ", tensor.layout(), "; parameters and buffers must be dense");
  return uninitialized(tensor.sizes(), tensor.strides(), tensor.options().device(device), runtime);
}

}  // namespace

at::Tensor uninitialized(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                         const c10::TensorOptions& options, comm::Runtime* runtime) {
  if (runtime == nullptr || options.device().is_meta()) {
    return at::empty_strided(sizes, strides, options);
  }
  at::Tensor tensor = at::empty({0}, options);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  runtime->alloc_storage(tensor);
  return tensor;
}

void replace_data(const at::Tensor& tensor, const at::Tensor& data) {
  TORCH_CHECK(dtensor::is_dtensor(tensor) == dtensor::is_dtensor(data),
              "replace_data: one of the tensors is a DTensor, the other is not");
  tensor.unsafeGetTensorImpl()->shallow_copy_from(data.getIntrusivePtr());
  // The accumulator checks gradients against the device and dtype that it was made for.
  if (torch::autograd::impl::try_get_grad_accumulator(tensor) != nullptr) {
    torch::autograd::impl::set_grad_accumulator(tensor, {});
  }
}

void to_empty(torch::nn::Module& module, c10::Device device, bool recurse) {
  const at::NoGradGuard no_grad;
  Tensors tensors;
  if (recurse) {
    visit_modules(module, [&](const std::string&, torch::nn::Module& each) { tensors.add(each); });
  } else {
    tensors.add(module);
    // They may lay out parameters of modules below this one.
    tensors.extensions.clear();
  }
  std::unordered_set<const c10::TensorImpl*> done;
  for (ModuleExtension* extension : tensors.extensions) {
    for (const at::Tensor& tensor : extension->to_empty(device)) {
      done.insert(tensor.unsafeGetTensorImpl());
    }
  }
  comm::Runtime* runtime = runtime_of(tensors.all);
  for (const at::Tensor& tensor : tensors.all) {
    if (!done.contains(tensor.unsafeGetTensorImpl())) {
      replace_data(tensor, uninitialized_like(tensor, device, runtime));
    }
    if (tensor.grad().defined()) tensor.mutable_grad().reset();
  }
}

}  // namespace ppfsdp::nn
