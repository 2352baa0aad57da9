#include "src/comm/host_memory.h"

#include <malloc.h>

#include <limits>

namespace ppfsdp::comm {

void keep_freed_memory() {
  constexpr int kMost = std::numeric_limits<int>::max();
  mallopt(M_ARENA_MAX, 1);
  mallopt(M_MMAP_THRESHOLD, kMost);
  mallopt(M_TRIM_THRESHOLD, kMost);
  mallopt(M_TOP_PAD, 64 << 20);
}

}  // namespace ppfsdp::comm
