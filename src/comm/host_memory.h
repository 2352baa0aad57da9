#pragma once

#include <cstdint>

namespace ppfsdp::comm {

/// Bytes of memory that this machine has.
int64_t physical_memory_bytes();

/// The largest resident memory of this process so far, in bytes; 0 where the system doesn't tell.
int64_t peak_resident_bytes();

/// Makes freed host memory be kept for reuse, by the C library and for tensors (see
/// host_allocator.h), for the rest of the process: what LibTorch's caching allocator does on a GPU.
/// Gathered parameters and gradients are large buffers that come and go several times a step; by
/// default each is mapped from the system and its pages cleared anew. One arena serves all threads,
/// since of a simulated mesh's ranks one runs at a time, so that a rank takes up the memory that
/// the last one left in the cache. Call it first in main.
void keep_freed_memory();

}  // namespace ppfsdp::comm
