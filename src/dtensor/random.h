#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <memory>
#include <optional>

/// Random values in DTensors.
///
/// normal_, uniform_, bernoulli_, random_, exponential_, geometric_, log_normal_, cauchy_, the
/// *_like creations, dropout, and all that is made of them (torch::nn::init, say) draw on the CPU
/// exactly the values that the plain unsharded tensor of the same sizes, strides and dtype gets
/// from the same generator, on any mesh, in any placement but Partial, and leave the generator in
/// the same state, byte for byte. Every rank must call them alike, with generators in the same
/// state: an explicit one, or the runtime's default_generator(), of which each rank has its own. So
/// replicas are equal, and a sharded model starts as the model of one device.
///
/// On a GPU the same holds of uniform_, normal_, bernoulli_(p), exponential_, random_ and the
/// *_like creations, of real numbers: the values are those that the plain tensor gets on that model
/// of GPU (philox_cuda.h), since a rank runs ATen's own op on the pieces that its part lies in. Ops
/// that have kernels of other kinds there (dropout, bernoulli_ of a tensor of probabilities), and
/// parts of geometric_, log_normal_ and cauchy_, throw.
///
/// On the CPU a rank draws the values of its own part, and those between that are too few to skip
/// (1024 in a row). What it skips costs the generator's steps alone, or, from millions on, a jump
/// (random_skip.h). So time is at most one pass of drawing the whole, and for shards of dim 0 about
/// that of the shard; memory is O(part + block).
namespace ppfsdp::dtensor {

/// While one is alive, random ops on DTensors on this thread, and in the backward that it runs on
/// whatever thread, draw nothing from a generator: the
/// value of an element is a function of `seed`, the number of the op (counted from `first_draw` on)
/// and the element's row-major index in the whole tensor (fill_indexed, philox_indexed.h). The same
/// on every device, mesh and placement, at the cost of the rank's own part. Values differ from
/// those of ATen's kernels. Ops that have no such form (geometric_, log_normal_, cauchy_) throw.
///
/// Each rank makes its own. One inside another's lifetime stands in for it.
class IndexedRandomGuard {
 public:
  explicit IndexedRandomGuard(uint64_t seed, uint64_t first_draw = 0);
  ~IndexedRandomGuard();
  IndexedRandomGuard(const IndexedRandomGuard&) = delete;
  IndexedRandomGuard& operator=(const IndexedRandomGuard&) = delete;

  /// The number of the next op: where a later guard goes on.
  uint64_t next_draw() const;

 private:
  friend struct IndexedDraw;
  struct State;

  std::shared_ptr<State> state_;
  /// LibTorch hands it on to the threads that backward runs on.
  c10::DebugInfoGuard guard_;
};

/// For the rules: what the op that asks is to draw from.
struct IndexedDraw {
  uint64_t seed;
  uint64_t draw;

  /// Of the guard alive on this thread, which it moves on; none if there is none.
  static std::optional<IndexedDraw> take();
  /// Whether there is one.
  static bool is_on();
};

}  // namespace ppfsdp::dtensor
