#pragma once

namespace ppfsdp::comm {

/// From now on tensors on the host take their memory from lists of freed blocks, one for each of
/// four sizes a power of two up to 1 MiB; larger ones as before. LibTorch asks the C library for
/// aligned memory each time, which cuts it out of larger pieces and joins them again: a search that
/// grows with the number of tensors alive, as that of a simulated mesh does with its ranks. A block
/// once used is never given back. For the whole process; call it before the first tensor is made.
void reuse_tensor_memory();

}  // namespace ppfsdp::comm
