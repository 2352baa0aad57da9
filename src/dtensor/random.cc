#include "src/dtensor/random.h"

namespace ppfsdp::dtensor {
namespace {

/// One of the kinds that LibTorch keeps for its users, and uses for nothing of its own.
constexpr auto kKind = c10::DebugInfoKind::INFERENCE_CONTEXT;

}  // namespace

struct IndexedRandomGuard::State : c10::DebugInfoBase {
  State(uint64_t seed, uint64_t next_draw) : seed(seed), next_draw(next_draw) {}
  static State* current() { return dynamic_cast<State*>(c10::ThreadLocalDebugInfo::get(kKind)); }

  uint64_t seed;
  uint64_t next_draw;
};

IndexedRandomGuard::IndexedRandomGuard(uint64_t seed, uint64_t first_draw)
    : state_(std::make_shared<State>(seed, first_draw)), guard_(kKind, state_) {}

IndexedRandomGuard::~IndexedRandomGuard() = default;

uint64_t IndexedRandomGuard::next_draw() const { return state_->next_draw; }

std::optional<IndexedDraw> IndexedDraw::take() {
  auto* state = IndexedRandomGuard::State::current();
  if (state == nullptr) {
    return std::nullopt;
  }
  return IndexedDraw{state->seed, state->next_draw++};
}

bool IndexedDraw::is_on() { return IndexedRandomGuard::State::current() != nullptr; }

}  // namespace ppfsdp::dtensor
