#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "src/comm/runtime.h"

namespace ppfsdp::nccl {

/// Why this process cannot use CUDA, in one line; nothing if it can.
std::optional<std::string> why_no_cuda();

/// Makes the GPU the calling thread's current device. c10::Error in one line if this process does
/// not see that many.
void use_device(int index);

/// "0000:3b:00.0"; c10::Error as use_device. Starts nothing on the GPU.
std::string pci_bus_id(int device);

comm::DeviceGrid device_grid(int device);

/// What the caching allocator has held for tensors at most, and the device's memory.
comm::MemoryUse memory_use(int device);

}  // namespace ppfsdp::nccl
