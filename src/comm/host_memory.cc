#include "src/comm/host_memory.h"

#include <malloc.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <limits>
#include <string>

#include "src/comm/host_allocator.h"

namespace ppfsdp::comm {

int64_t physical_memory_bytes() {
  return static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
}

int64_t peak_resident_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    long long kilobytes = 0;
    if (std::sscanf(line.c_str(), "VmHWM: %lld kB", &kilobytes) == 1) return kilobytes * 1024;
  }
  return 0;
}

void keep_freed_memory() {
  constexpr int kMost = std::numeric_limits<int>::max();
  mallopt(M_ARENA_MAX, 1);
  mallopt(M_MMAP_THRESHOLD, kMost);
  mallopt(M_TRIM_THRESHOLD, kMost);
  mallopt(M_TOP_PAD, 64 << 20);
  reuse_tensor_memory();
}

}  // namespace ppfsdp::comm
