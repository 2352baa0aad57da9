#include "sim/mesh/shared_memory.h"

#include <c10/core/impl/COWDeleter.h>
#include <c10/util/Exception.h>

#include <memory>
#include <utility>

namespace ppfsdp::sim {
namespace {

using c10::impl::cow::cow_deleter;
using c10::impl::cow::COWDeleterContext;

c10::DataPtr copy_on_write(c10::DataPtr memory) {
  void* data = memory.get();
  const c10::Device device = memory.device();
  const c10::DeleterFnPtr deleter = memory.get_deleter();
  auto* context = new COWDeleterContext({memory.release_context(), deleter});
  return {data, context, &cow_deleter, device};
}

}  // namespace

SharedMemory::SharedMemory(size_t bytes)
    : bytes_(bytes), memory_(copy_on_write(c10::GetAllocator(c10::kCPU)->allocate(bytes))) {}

void SharedMemory::put_under(c10::StorageImpl& storage, size_t bytes) const {
  TORCH_INTERNAL_ASSERT(bytes <= bytes_);
  auto* context = memory_.cast_context<COWDeleterContext>(&cow_deleter);
  context->increment_refcount();
  storage.set_data_ptr_noswap(c10::DataPtr(memory_.get(), context, &cow_deleter, memory_.device()));
  storage.set_nbytes(bytes);
}

}  // namespace ppfsdp::sim
