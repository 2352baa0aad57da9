#include "backends/nccl/cuda_device.h"

#include <ATen/Context.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <array>
#include <cstdlib>

namespace ppfsdp::nccl {
namespace {

/// 13000 is "13.0".
std::string version(int number) { return fmt::format("{}.{}", number / 1000, number % 1000 / 10); }

/// What makes the process see other GPUs than there are.
std::string visible() {
  const char* devices = std::getenv("CUDA_VISIBLE_DEVICES");
  return devices == nullptr ? "CUDA_VISIBLE_DEVICES is not set"
                            : fmt::format("CUDA_VISIBLE_DEVICES is '{}'", devices);
}

int attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}

/// c10::Error in one line if this process does not see that many GPUs.
void check_visible(int index) {
  int count = 0;
  C10_CUDA_CHECK(cudaGetDeviceCount(&count));
  TORCH_CHECK(index >= 0 && index < count, "nccl: local rank ", index,
              " has no GPU of its own: ", count, count == 1 ? " is" : " are", " visible (",
              visible(), "); start one rank a visible GPU at most");
}

}  // namespace

std::optional<std::string> why_no_cuda() {
  int driver = 0;
  // 0 when there is no driver.
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) {
    return fmt::format("no NVIDIA driver is installed; this binary needs one for CUDA {}",
                       version(CUDART_VERSION));
  }
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  // CUDA remembers its last error for whoever asks next.
  (void)cudaGetLastError();
  if (error == cudaErrorInsufficientDriver) {
    return fmt::format("the NVIDIA driver is too old: it knows CUDA {}, this binary needs {}",
                       version(driver), version(CUDART_VERSION));
  }
  if (error == cudaErrorNoDevice || (error == cudaSuccess && count == 0)) {
    return fmt::format("no GPU is visible; {}", visible());
  }
  if (error != cudaSuccess) {
    return fmt::format("CUDA does not start: {}", cudaGetErrorString(error));
  }
  return std::nullopt;
}

void use_device(int index) {
  check_visible(index);
  at::globalContext().lazyInitDevice(c10::kCUDA);
  c10::cuda::set_device(static_cast<c10::DeviceIndex>(index));
}

std::string pci_bus_id(int device) {
  check_visible(device);
  std::array<char, 32> text{};
  C10_CUDA_CHECK(cudaDeviceGetPCIBusId(text.data(), text.size(), device));
  return text.data();
}

comm::DeviceGrid device_grid(int device) {
  return {attribute(cudaDevAttrMultiProcessorCount, device),
          attribute(cudaDevAttrMaxThreadsPerMultiProcessor, device)};
}

comm::MemoryUse memory_use(int device) {
  const auto index = static_cast<c10::DeviceIndex>(device);
  // CUDA tells it of the device that is current.
  const c10::cuda::CUDAGuard on_device(index);
  size_t free = 0, total = 0;
  C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(index);
  return {stats.active_bytes[kAll].peak, static_cast<int64_t>(total)};
}

}  // namespace ppfsdp::nccl
