#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "src/comm/runtime.h"

namespace ppfsdp::comm {

/// A world of one rank without threads or transport: streams run at once and collectives are copies
/// or nothing. `device`: cpu, or meta (where no memory is touched).
std::unique_ptr<Runtime> make_single_runtime(c10::Device device = c10::Device(c10::kCPU));

}  // namespace ppfsdp::comm
