#include "src/cli/gpus.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace ppfsdp::cli {

int count_gpus() {
  // CUDA's part of LibTorch registers itself, where it is linked.
  if (!c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA)) return 0;
  return c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA)->deviceCount();
}

int device_of(const start::Launched& launched, int gpus) {
  return launched.launcher == "Slurm" && gpus == 1 ? 0 : launched.local_rank;
}

}  // namespace ppfsdp::cli
