#pragma once

namespace ppfsdp::train {

/// The speed of a float32 matrix product [768, 768] x [768, 768] on this thread, in FLOP/s: the
/// best of a few, some tens of milliseconds together. What MFU is a part of where no peak is given:
/// a processor's nominal peak says little about what its clock and cores allow.
double measure_peak_flops();

}  // namespace ppfsdp::train
