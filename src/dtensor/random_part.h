#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "src/comm/runtime.h"
#include "src/dtensor/philox.h"
#include "src/dtensor/placement.h"
#include "src/mesh/device_mesh.h"

namespace ppfsdp::dtensor {

/// A random op without the tensor it fills.
struct RandomOp {
  const char* name;
  /// Fills a plain tensor of any sizes: ATen's own op, so that the bits are ATen's.
  std::function<void(const at::Tensor& tensor, const at::Generator& generator)> fill;
  /// What it draws, for IndexedRandomGuard and for GPUs; none if it has no values by index.
  std::optional<Distribution> distribution;
};

/// The part of a tensor that this rank holds, for random ops. See random.h.
///
/// What ATen's ops do on the CPU (DistributionTemplates.h), and what follows for drawing a part:
///  - All are serial loops over the tensor's elements in the order in which they lie in memory, and
///    take a fixed number of draws an element: they may be cut anywhere, and what a cut skips is a
///    number of draws. (A build with MKL could take other streams for bernoulli_(p) and
///    exponential_; LibTorch 2.11 has that switched off, and random_part_test.cc would see it.)
///  - normal_ is such a loop for fewer than 16 elements and for tensors that are not contiguous. It
///    makes two values at once and leaves the second in the generator: cuts after an even number
///    carry it on.
///  - normal_ on 16 contiguous elements or more draws a uniform value for each element, turns each
///    group of 16 into normal ones, and, when the number is no multiple of 16, draws the last 16
///    anew from 16 further draws. So it may be cut at multiples of 16 if the last piece has 16
///    elements or more.
/// All cuts are at multiples of 16, and the last piece has between 16 and 31 elements, for every
/// op. Complex tensors are real ones of twice the elements.
class RandomPart {
 public:
  /// Of a whole tensor of `sizes` and `strides`. Throws for Partial placements and for strides of
  /// 0.
  RandomPart(const char* function, const mesh::DeviceMesh& mesh, const Placements& placements,
             std::vector<int64_t> sizes, std::vector<int64_t> strides);

  /// Fills `local`, which has the part's sizes and any strides, as `op` on the whole tensor would.
  /// Locks the generator for the time of the draw, as ATen does. The generator is moved on only
  /// when all went well. Of `runtime`, which made the mesh, a GPU's figures are asked for.
  void draw(const at::Tensor& local, const RandomOp& op, at::Generator generator,
            const comm::Runtime& runtime) const;

  /// The same for a device with ATen's CUDA kernels, a Philox generator on it, and these figures:
  /// `op` fills scratch tensors, the windows of PhiloxLayout (philox_cuda.h), and what of them is
  /// this part's is copied. Uses no more of the device than op.fill does, so that any function of
  /// the generator's seed and offset can stand in for the kernel.
  void draw_by_windows(const at::Tensor& local, const RandomOp& op, at::Generator generator,
                       const comm::DeviceGrid& grid) const;

  /// `local` is the whole tensor as it is.
  bool is_whole(const at::Tensor& local) const;

 private:
  struct Dim {
    int64_t dim;
    int64_t size;
    ShardRange range;
  };
  class Runs;
  class Walk;

  static void copy_runs(const at::Tensor& values, int64_t first, int64_t end, Runs& runs,
                        const at::Tensor& local);

  std::vector<int64_t> sizes_;
  std::vector<int64_t> strides_;
  std::vector<ShardRange> ranges_;
  std::vector<Dim> order_;  ///< as the elements lie in memory, the slowest dim first
  int64_t numel_ = 1;
  bool holds_none_ = false;
  bool contiguous_ = true;
};

}  // namespace ppfsdp::dtensor
