#pragma once

#include <c10/core/ScalarType.h>

#include "src/comm/runtime.h"

namespace ppfsdp::train {

/// The speed of a float32 matrix product [768, 768] x [768, 768] on this thread, in FLOP/s: the
/// best of a few, some tens of milliseconds together. What MFU is a part of where no peak is given:
/// a processor's nominal peak says little about what its clock and cores allow.
double measure_peak_flops();

/// The same of the runtime's device, where that is another than the CPU: of a product of `dtype`
/// [8192, 8192] x [8192, 8192], which keeps all of a GPU busy. Waits for the device.
double measure_peak_flops(comm::Runtime& runtime, c10::ScalarType dtype);

}  // namespace ppfsdp::train
