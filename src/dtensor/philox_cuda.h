#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "src/comm/runtime.h"
#include "src/dtensor/philox.h"

namespace ppfsdp::dtensor {

/// What ATen's CUDA generator holds before an op.
struct PhiloxState {
  uint64_t seed = 0;
  uint64_t offset = 0;  ///< Generator::get_offset(); a multiple of 4
};

using PhiloxGrid = comm::DeviceGrid;

/// Where an element's value is in Philox's sequences.
struct PhiloxPlace {
  uint64_t subsequence = 0;  ///< the thread that draws it
  uint64_t offset = 0;       ///< words that this thread skips, the generator's offset included
  int lane = 0;              ///< which of the values of the thread's one draw
};

/// A piece of the unsharded tensor that ATen's own op draws on a scratch tensor: set the
/// generator's offset, run the op on `numel` contiguous elements of the same dtype, and the
/// scratch's element k is the tensor's element first + k, for all k that the tensor has.
struct PhiloxWindow {
  int64_t first = 0;
  int64_t numel = 0;
  uint64_t offset = 0;
};

/// How ATen's random ops on CUDA spread Philox's values over a dense tensor. Elements are counted
/// as they lie in memory, which for a contiguous tensor is row-major. The rules, of LibTorch 2.11
/// and CUDA 13.0:
///  - Grid (ATen/native/cuda/DistributionTemplates.h, calc_execution_policy): blocks of 256
///  threads;
///    min(multiprocessors * (threads_per_multiprocessor / 256), ceil(numel / 256)) of them.
///  - Elements (same file, distribution_elementwise_grid_stride_kernel): of T threads, thread t
///  draws
///    `unroll` values a round, and value `lane` of round r goes to element (r * unroll + lane) * T
///    + t.
///  - Unroll (same file, distribution_nullary_kernel): how many values of the type in which the
///    kernel computes are in 16 bytes: 4 for 32 bits, 2 for 64.
///  - Counter (curand_kernel.h, curand_init and curand4): thread t's subsequence is t, in the
///    counter's high half; its low half is (generator's offset) / 4 + r; the seed is the key.
///  - The generator's offset (calc_execution_policy, and CUDAGeneratorImpl.cpp,
///    CUDAGeneratorState::increase) grows by 4 a round.
///  - Tensors of more than 2^31 - 1 bytes (TensorIterator.cpp, can_use_32bit_indexing, split and
///    SplitUntil32Bit): halved, the first half the smaller one, until each piece fits; each piece
///    is drawn as a tensor of its own, in order. The whole's own increment, which nothing uses,
///    comes first.
/// Not covered: dropout and bernoulli_(Tensor), which have kernels of their own.
class PhiloxLayout {
 public:
  /// `element_size` in bytes; `unroll` from philox_unroll. Throws for figures that are no device's
  /// (fewer than 256 threads a multiprocessor among them).
  PhiloxLayout(int64_t numel, int64_t element_size, int unroll, PhiloxGrid grid);

  int64_t numel() const { return numel_; }

  /// What the op adds to the generator's offset.
  uint64_t offset_increment() const { return increment_; }

  /// Where element `element` of the tensor comes from, when the generator's offset is `offset`.
  PhiloxPlace place(int64_t element, uint64_t offset) const;

  /// Windows that together hold elements [first, first + count), in order, when the generator's
  /// offset is `offset`. None is greater than one round of the grid (unroll * threads): memory for
  /// a shard's values is O(shard + round), and every shard's values are the device's own bits.
  std::vector<PhiloxWindow> windows(int64_t first, int64_t count, uint64_t offset) const;

 private:
  /// A part of the tensor that one kernel fills.
  struct Piece {
    int64_t first;
    int64_t numel;
    int64_t threads;
    uint64_t offset;  // after the op's own
  };
  const Piece& piece_of(int64_t element) const;
  void add_pieces(int64_t first, int64_t numel);
  int64_t threads_for(int64_t numel) const;
  uint64_t increment_for(int64_t numel) const;

  int64_t numel_;
  int64_t element_size_;
  int64_t unroll_;
  int64_t max_blocks_;
  uint64_t increment_ = 0;
  std::vector<Piece> pieces_;
};

/// How many values a thread draws at once.
int philox_unroll(const Distribution& distribution, c10::ScalarType dtype);

/// The layout of the op that draws `distribution` into `numel` elements of `dtype`.
PhiloxLayout philox_layout(const Distribution& distribution, c10::ScalarType dtype, int64_t numel,
                           PhiloxGrid grid);

/// Elements [first, first + count) of what ATen's CUDA op draws, computed here one by one, as a CPU
/// tensor of `dtype`. Uniform, Bernoulli, RandomInt and Random are the device's bits: each of their
/// operations rounds as IEEE 754 says, and nvcc makes one fused multiply-add of from + range * u,
/// as is done here (seen in the PTX that nvcc 13.0 makes of ATen's uniform_kernel). Normal and
/// Exponential go through logarithm, sine and cosine, for which the device has approximations of
/// its own (logf, __logf and __sincosf; in double log and sincospi) and this function the host's
/// libm: in float they differ by about 1e-6 of the standard deviation. For the device's bits of
/// these run the windows on the device. Throws as check_distribution, and for a range outside of
/// the tensor.
at::Tensor philox_cuda_values(const Distribution& distribution, c10::ScalarType dtype,
                              int64_t numel, PhiloxState state, PhiloxGrid grid, int64_t first,
                              int64_t count);

}  // namespace ppfsdp::dtensor
