#include "src/comm/host_memory.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstdlib>
#include <fstream>
#include <string>

namespace ppfsdp::comm {
namespace {

// Against the kernel's own account, in kB; its first line is "MemTotal: N kB".
TEST(HostMemory, IsWhatTheKernelSays) {
  std::ifstream file("/proc/meminfo");
  std::string name;
  int64_t kilobytes = 0;
  file >> name >> kilobytes;
  ASSERT_EQ(name, "MemTotal:");
  EXPECT_EQ(physical_memory_bytes(), kilobytes * 1024);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

long page_faults() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

// Memory that goes back to the system is cleared page by page each time a parameter is gathered.
TEST(HostMemory, ABufferFreedAndAllocatedAgainFaultsNoPages) {
  constexpr size_t kBytes = 48 << 20;
  const auto touch = [] {
    auto* buffer = static_cast<volatile char*>(std::malloc(kBytes));
    for (size_t i = 0; i < kBytes; i += 4096) {
      buffer[i] = 1;
    }
    std::free(const_cast<char*>(buffer));
  };
  keep_freed_memory();
  const long before = page_faults();
  touch();
  const long first = page_faults() - before;
  touch();
  const long second = page_faults() - before - first;
  EXPECT_GT(first, 0);
  EXPECT_LT(second, first / 10);
}

#endif

}  // namespace
}  // namespace ppfsdp::comm
