#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>

#include <optional>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>

#include "backends/nccl/cuda_device.h"
#include "backends/nccl/nccl.h"
#include "backends/nccl/runtime.h"
#include "backends/start/binding.h"

namespace ppfsdp::nccl {

std::optional<std::string> why_unavailable() { return why_no_cuda(); }

std::unique_ptr<comm::Runtime> make_runtime(const NcclOptions& options) {
  options.check("nccl");
  const std::optional<std::string> reason = why_no_cuda();
  TORCH_CHECK(!reason, "nccl: ", *reason);
  const int device = options.local_rank;
  // Before CUDA or this runtime start threads, which inherit it, and pin memory.
  const std::string bound = start::bind_to_gpu(pci_bus_id(device));
  if (options.log) options.log(bound);
  use_device(device);

  Settings settings;
  settings.rank = options.rank;
  settings.world_size = options.world_size;
  settings.tensors = c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device));
  settings.streams = settings.tensors;
  settings.hooks.device_grid = [device] { return device_grid(device); };
  settings.hooks.memory_use = [device] { return memory_use(device); };
  settings.timeout = options.timeout;
  settings.checked = options.checked;
  // A rank that is alone needs no address.
  if (options.world_size == 1) {
    settings.store = c10::make_intrusive<c10d::HashStore>();
  } else {
    settings.store = start::meet(options).store;
  }
  return make_runtime(std::move(settings));
}

}  // namespace ppfsdp::nccl
