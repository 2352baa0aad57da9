#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace ppfsdp::fsdp {

/// Where one parameter's shards lie in a group's flat buffers. All numbers are elements of the
/// buffer.
///
/// A parameter of n elements over w ranks is w chunks of `chunk` elements (ceil(rows / w) whole
/// rows, the dim-0 rule); the last ones are short or empty in the parameter and zero-padded in
/// buffers.
struct ParamExtent {
  int64_t numel = 0;
  int64_t chunk = 0;
  int64_t offset = 0;  ///< of the chunk within a rank's part of the buffer

  /// First element of rank `rank`'s chunk, and how many of the parameter's elements it holds.
  int64_t begin(int64_t rank) const { return std::min(numel, rank * chunk); }
  int64_t length(int64_t rank) const { return std::min(chunk, numel - begin(rank)); }
};

/// Layout of a flat buffer of `world` equal parts, one a rank; each part holds the chunk of every
/// parameter, side by side. This is the layout of FSDP2's buffers, and with it the order in which a
/// ring adds the elements.
struct FlatLayout {
  int64_t world = 1;
  int64_t part = 0;  ///< elements of one rank's part
  std::vector<ParamExtent> params;

  /// Appends a parameter behind those already here.
  void add(int64_t numel, int64_t chunk);
};

/// Elements of one chunk of a parameter of `sizes` (at least one dim) over `world` ranks:
/// ceil(rows / world) whole rows, the dim-0 rule.
int64_t chunk_numel(at::IntArrayRef sizes, int64_t world);

/// Copies parameter `index` out of a gathered `buffer` (1-D, world * part elements) into `param`
/// (contiguous, numel elements, the buffer's dtype).
void copy_out(const FlatLayout& layout, size_t index, const at::Tensor& buffer,
              const at::Tensor& param);

/// Copies `grad` (numel elements, any strides, any dtype) into its chunks of `buffer` (1-D, world *
/// part elements), casting to the buffer's dtype, and zeroes their padding.
void copy_in(const FlatLayout& layout, size_t index, const at::Tensor& grad,
             const at::Tensor& buffer);

/// copy_out of all parameters, params[i] being parameter i. On a GPU, where launching a kernel for
/// each would take longer than copying, by one operation, if all have whole chunks for all ranks.
/// `fuse`: for tests, which have no GPU.
void copy_out_all(const FlatLayout& layout, const at::Tensor& buffer,
                  const std::vector<at::Tensor>& params, bool fuse);
inline void copy_out_all(const FlatLayout& layout, const at::Tensor& buffer,
                         const std::vector<at::Tensor>& params) {
  copy_out_all(layout, buffer, params, /*fuse=*/!buffer.is_cpu());
}

/// copy_in of all gradients, in order: grads[i], which has the parameter's rows, belongs to
/// parameter i, and all of them fill the buffer. By one operation likewise. Drops each gradient
/// when it is copied.
void copy_in_all(const FlatLayout& layout, std::vector<at::Tensor>& grads, const at::Tensor& buffer,
                 bool fuse);
inline void copy_in_all(const FlatLayout& layout, std::vector<at::Tensor>& grads,
                        const at::Tensor& buffer) {
  copy_in_all(layout, grads, buffer, /*fuse=*/!buffer.is_cpu());
}

/// Copies rank `rank`'s chunk of `param` (contiguous) to `chunk` (1-D, extent.chunk elements),
/// casting to its dtype, and zeroes the padding.
void copy_chunk(const ParamExtent& extent, int64_t rank, const at::Tensor& param,
                const at::Tensor& chunk);

/// A contiguous tensor of `dtype` and `sizes` over the memory of `buffer`, `offset_bytes` behind
/// its first element (a multiple of the dtype's size). Shares no version counter with it.
at::Tensor typed_view(const at::Tensor& buffer, at::ScalarType dtype, int64_t offset_bytes,
                      at::IntArrayRef sizes);

}  // namespace ppfsdp::fsdp
