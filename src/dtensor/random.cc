#include "src/dtensor/random.h"

namespace ppfsdp::dtensor {
namespace {

thread_local IndexedRandomGuard* innermost = nullptr;

}  // namespace

IndexedRandomGuard::IndexedRandomGuard(uint64_t seed, uint64_t first_draw)
    : seed_(seed), next_draw_(first_draw), outer_(innermost) {
  innermost = this;
}

IndexedRandomGuard::~IndexedRandomGuard() { innermost = outer_; }

std::optional<IndexedDraw> IndexedDraw::take() {
  if (innermost == nullptr) {
    return std::nullopt;
  }
  return IndexedDraw{innermost->seed_, innermost->next_draw_++};
}

}  // namespace ppfsdp::dtensor
