#include "src/fsdp/layout.h"

#include <ATen/ops/_chunk_cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/split_with_sizes_copy.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <cstring>

namespace ppfsdp::fsdp {
namespace {

// Plain bytes on the host beat a tensor operation a chunk by far: a group of ten small parameters
// is copied in the time of one dispatch.
bool can_use_memcpy(const at::Tensor& a, const at::Tensor& b) {
  return a.is_cpu() && b.is_cpu() && a.scalar_type() == b.scalar_type() && a.is_contiguous() &&
         b.is_contiguous();
}

at::Tensor chunks_of(const FlatLayout& layout, const ParamExtent& extent,
                     const at::Tensor& buffer) {
  return buffer.view({layout.world, layout.part}).narrow(1, extent.offset, extent.chunk);
}

}  // namespace

void FlatLayout::add(int64_t numel, int64_t chunk) {
  params.push_back({numel, chunk, part});
  part += chunk;
}

int64_t chunk_numel(at::IntArrayRef sizes, int64_t world) {
  return (sizes[0] + world - 1) / world * c10::multiply_integers(sizes.slice(1));
}

void copy_out(const FlatLayout& layout, size_t index, const at::Tensor& buffer,
              const at::Tensor& param) {
  const ParamExtent& extent = layout.params[index];
  if (extent.numel == 0) {
    return;
  }
  if (can_use_memcpy(buffer, param)) {
    const size_t size = buffer.itemsize();
    const char* from = static_cast<const char*>(buffer.const_data_ptr()) + extent.offset * size;
    char* to = static_cast<char*>(param.mutable_data_ptr());
    for (int64_t rank = 0; extent.begin(rank) < extent.numel; ++rank) {
      const size_t bytes = extent.length(rank) * size;
      std::memcpy(to, from, bytes);
      to += bytes;
      from += layout.part * size;
    }
    return;
  }
  // Whole chunks are one strided copy, the short one another: two operations for any world size.
  const int64_t whole = extent.numel / extent.chunk;
  const int64_t rest = extent.numel - whole * extent.chunk;
  const at::Tensor chunks = chunks_of(layout, extent, buffer);
  const at::Tensor flat = param.view({-1});
  if (whole > 0) {
    flat.narrow(0, 0, whole * extent.chunk)
        .view({whole, extent.chunk})
        .copy_(chunks.narrow(0, 0, whole));
  }
  if (rest > 0) {
    flat.narrow(0, whole * extent.chunk, rest).copy_(chunks[whole].narrow(0, 0, rest));
  }
}

void copy_in(const FlatLayout& layout, size_t index, const at::Tensor& grad,
             const at::Tensor& buffer) {
  const ParamExtent& extent = layout.params[index];
  if (extent.chunk == 0) {
    return;
  }
  if (can_use_memcpy(grad, buffer)) {
    const size_t size = buffer.itemsize();
    const size_t chunk = extent.chunk * size;
    const char* from = static_cast<const char*>(grad.const_data_ptr());
    char* to = static_cast<char*>(buffer.mutable_data_ptr()) + extent.offset * size;
    for (int64_t rank = 0; rank < layout.world; ++rank) {
      const size_t bytes = extent.length(rank) * size;
      std::memcpy(to, from, bytes);
      std::memset(to + bytes, 0, chunk - bytes);
      from += bytes;
      to += layout.part * size;
    }
    return;
  }
  const int64_t whole = extent.numel / extent.chunk;
  const int64_t rest = extent.numel - whole * extent.chunk;
  const int64_t used = whole + (rest > 0 ? 1 : 0);
  const at::Tensor chunks = chunks_of(layout, extent, buffer);
  const at::Tensor flat = grad.reshape({-1});
  if (whole > 0) {
    chunks.narrow(0, 0, whole)
        .copy_(flat.narrow(0, 0, whole * extent.chunk).view({whole, extent.chunk}));
  }
  if (rest > 0) {
    chunks[whole].narrow(0, 0, rest).copy_(flat.narrow(0, whole * extent.chunk, rest));
    chunks[whole].narrow(0, rest, extent.chunk - rest).zero_();
  }
  if (used < layout.world) {
    chunks.narrow(0, used, layout.world - used).zero_();
  }
}

void copy_out_all(const FlatLayout& layout, const at::Tensor& buffer,
                  const std::vector<at::Tensor>& params, bool fuse) {
  // In the order in which they lie in the buffer, each right behind the one before.
  std::vector<int64_t> sizes;
  std::vector<at::Tensor> chunks;
  int64_t end = 0;
  for (size_t i = 0; fuse && i < params.size(); ++i) {
    const ParamExtent& extent = layout.params[i];
    fuse = extent.offset == end && extent.numel == layout.world * extent.chunk &&
           params[i].scalar_type() == buffer.scalar_type();
    if (fuse) {
      end += extent.chunk;
      sizes.push_back(extent.chunk);
      chunks.push_back(params[i].view({layout.world, extent.chunk}));
    }
  }
  if (fuse && end == layout.part) {
    at::split_with_sizes_copy_out(chunks, buffer.view({layout.world, layout.part}), sizes, 1);
    return;
  }
  for (size_t i = 0; i < params.size(); ++i) {
    copy_out(layout, i, buffer, params[i]);
  }
}

void copy_in_all(const FlatLayout& layout, std::vector<at::Tensor>& grads, const at::Tensor& buffer,
                 bool fuse) {
  // LibTorch has nothing to say of tensors without elements.
  const auto has_elements = [](const at::Tensor& grad) { return grad.numel() > 0; };
  if (fuse && std::all_of(grads.begin(), grads.end(), has_elements)) {
    at::Tensor chunks = buffer.view({layout.world, layout.part});
    at::_chunk_cat_out(chunks, grads, 0, layout.world);
    grads.clear();
    return;
  }
  for (size_t i = 0; i < grads.size(); ++i) {
    copy_in(layout, i, grads[i], buffer);
    grads[i].reset();
  }
}

void copy_chunk(const ParamExtent& extent, int64_t rank, const at::Tensor& param,
                const at::Tensor& chunk) {
  const int64_t length = extent.length(rank);
  chunk.narrow(0, 0, length).copy_(param.view({-1}).narrow(0, extent.begin(rank), length));
  chunk.narrow(0, length, extent.chunk - length).zero_();
}

at::Tensor typed_view(const at::Tensor& buffer, at::ScalarType dtype, int64_t offset_bytes,
                      at::IntArrayRef sizes) {
  const int64_t begin = buffer.storage_offset() * buffer.element_size() + offset_bytes;
  const int64_t size = static_cast<int64_t>(c10::elementSize(dtype));
  TORCH_CHECK(begin % size == 0, "typed_view: byte ", begin, " is not aligned for ", dtype);
  at::Tensor view = at::empty({0}, buffer.options().dtype(dtype));
  view.set_(buffer.storage(), begin / size, sizes, c10::contiguous_strides(sizes));
  return view;
}

}  // namespace ppfsdp::fsdp
