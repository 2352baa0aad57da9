#include "sim/mesh/poison.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace ppfsdp::sim {

void poison(void* data, size_t bytes) {
  // What is filled doubles the next piece, up to one that stays in the L1 cache.
  constexpr size_t kLargest = 4096;
  constexpr uint8_t kPattern[] = {0xff, 0x7f};
  auto* to = static_cast<uint8_t*>(data);
  for (size_t i = 0; i < std::min(bytes, sizeof(kPattern)); ++i) to[i] = kPattern[i];
  for (size_t filled = sizeof(kPattern); filled < bytes;) {
    const size_t piece = std::min({filled, kLargest, bytes - filled});
    std::memcpy(to + filled, to, piece);
    filled += piece;
  }
}

}  // namespace ppfsdp::sim
