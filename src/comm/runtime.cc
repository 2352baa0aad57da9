#include "src/comm/runtime.h"

#include <ATen/Context.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>

#include "src/comm/host_memory.h"

namespace ppfsdp::comm {
namespace {

c10::StorageImpl& storage_of(const at::Tensor& tensor, const char* function) {
  TORCH_CHECK(tensor.defined(), function, ": the tensor is undefined");
  TORCH_CHECK(tensor.unsafeGetTensorImpl()->has_storage(), function,
              ": the tensor has no storage of its own (of a DTensor, pass the local tensor)");
  return *tensor.storage().unsafeGetStorageImpl();
}

}  // namespace

size_t storage_bytes(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  int64_t last = tensor.storage_offset();
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return static_cast<size_t>(last + 1) * tensor.itemsize();
}

at::Generator Runtime::default_generator() {
  return at::globalContext().defaultGenerator(device().is_meta() ? c10::Device(c10::kCPU)
                                                                 : device());
}

DeviceGrid Runtime::device_grid() const {
  TORCH_CHECK(false, "device_grid: ", device(), " is no GPU and has no multiprocessors");
}

MemoryUse Runtime::memory_use() const { return {peak_resident_bytes(), physical_memory_bytes()}; }

void Runtime::free_storage(const at::Tensor& tensor) {
  c10::StorageImpl& storage = storage_of(tensor, "free_storage");
  storage.set_data_ptr_noswap(c10::DataPtr(nullptr, storage.device()));
  storage.set_nbytes(0);
}

void Runtime::alloc_storage(const at::Tensor& tensor) {
  c10::StorageImpl& storage = storage_of(tensor, "alloc_storage");
  const size_t bytes = storage_bytes(tensor);
  if (storage.nbytes() >= bytes) return;
  // A GPU's allocator takes from the device that is current.
  const c10::DeviceGuard on_device(storage.device());
  storage.set_data_ptr_noswap(c10::GetAllocator(storage.device_type())->allocate(bytes));
  storage.set_nbytes(bytes);
}

}  // namespace ppfsdp::comm
