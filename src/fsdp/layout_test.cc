#include "src/fsdp/layout.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <gtest/gtest.h>

#include <algorithm>

namespace ppfsdp::fsdp {
namespace {

struct Shape {
  int64_t rows;
  int64_t row;
};

// Fewer rows than ranks, one row, none, rows that divide and that do not.
const std::vector<Shape> kShapes = {{16, 3}, {7, 5}, {1, 4}, {5, 1}, {0, 3}, {17, 2}};

FlatLayout layout_for(int64_t world) {
  FlatLayout layout{world, 0, {}};
  for (const Shape& shape : kShapes) {
    layout.add(shape.rows * shape.row, chunk_numel({shape.rows, shape.row}, world));
  }
  return layout;
}

std::vector<at::Tensor> params(at::ScalarType dtype) {
  std::vector<at::Tensor> result;
  double start = 1;
  for (const Shape& shape : kShapes) {
    result.push_back(at::arange(start, start + shape.rows * shape.row, at::kFloat)
                         .to(dtype)
                         .view({shape.rows, shape.row}));
    start += 100;
  }
  return result;
}

// The layout spelled out with LibTorch operations: pad each parameter to world chunks, then put
// chunk r of all of them into part r.
at::Tensor expected_buffer(const FlatLayout& layout, const std::vector<at::Tensor>& params,
                           at::ScalarType dtype) {
  std::vector<at::Tensor> pieces;
  for (int64_t rank = 0; rank < layout.world; ++rank) {
    for (size_t i = 0; i < params.size(); ++i) {
      const int64_t chunk = layout.params[i].chunk;
      const at::Tensor padded = at::constant_pad_nd(
          params[i].flatten(), {0, chunk * layout.world - params[i].numel()}, 0);
      pieces.push_back(padded.narrow(0, rank * chunk, chunk));
    }
  }
  return at::cat(pieces).to(dtype);
}

class Layout : public ::testing::TestWithParam<int64_t> {};

// A misplaced or unpadded element would be added to another parameter's gradient, silently.
TEST_P(Layout, CopyInIsPadChunkCat) {
  const FlatLayout layout = layout_for(GetParam());
  // float -> float takes the memcpy path; bfloat16 -> float and strided gradients the tensor path.
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const auto grads = params(dtype);
    const at::Tensor buffer = at::full({layout.world * layout.part}, NAN, at::kFloat);
    for (size_t i = 0; i < grads.size(); ++i) {
      copy_in(layout, i, grads[i], buffer);
    }
    EXPECT_TRUE(at::equal(buffer, expected_buffer(layout, grads, at::kFloat))) << dtype;
  }
  const auto grads = params(at::kFloat);
  const at::Tensor buffer = at::full({layout.world * layout.part}, NAN, at::kFloat);
  for (size_t i = 0; i < grads.size(); ++i) {
    copy_in(layout, i, grads[i].t().contiguous().t(), buffer);
  }
  EXPECT_TRUE(at::equal(buffer, expected_buffer(layout, grads, at::kFloat))) << "strided";
}

// What was gathered must be the parameter again, whatever the padding between its chunks.
TEST_P(Layout, CopyOutUndoesIt) {
  const FlatLayout layout = layout_for(GetParam());
  const auto full = params(at::kFloat);
  const at::Tensor buffer = expected_buffer(layout, full, at::kFloat);
  for (size_t i = 0; i < full.size(); ++i) {
    at::Tensor out = at::full({full[i].numel()}, NAN, at::kFloat);
    copy_out(layout, i, buffer, out);
    EXPECT_TRUE(at::equal(out, full[i].flatten())) << i;
    // Another dtype takes the tensor path.
    out = at::full({full[i].numel()}, NAN, at::kDouble);
    copy_out(layout, i, buffer, out);
    EXPECT_TRUE(at::equal(out, full[i].flatten().to(at::kDouble))) << i;
  }
}

// What a GPU does in one operation must be what the others do one by one.
TEST_P(Layout, FusedCopiesAreTheSame) {
  const int64_t world = GetParam();
  const std::vector<std::vector<Shape>> groups = {
      kShapes, {{16, 3}, {7, 5}, {1, 4}, {17, 2}}, {{16 * world, 3}, {world, 5}, {2 * world, 1}}};
  for (const std::vector<Shape>& shapes : groups) {
    FlatLayout layout{world, 0, {}};
    std::vector<at::Tensor> full;
    for (const Shape& shape : shapes) {
      layout.add(shape.rows * shape.row, chunk_numel({shape.rows, shape.row}, world));
      full.push_back(at::rand({shape.rows, shape.row}));
    }
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
      std::vector<at::Tensor> grads, out;
      for (const at::Tensor& param : full) {
        // The first of them strided.
        grads.push_back(grads.empty() ? param.to(dtype).t().contiguous().t() : param.to(dtype));
        out.push_back(at::full({param.numel()}, NAN, at::kFloat));
      }
      const at::Tensor wanted = expected_buffer(layout, grads, at::kFloat);
      const at::Tensor buffer = at::full({layout.world * layout.part}, NAN, at::kFloat);
      copy_in_all(layout, grads, buffer, /*fuse=*/true);
      EXPECT_TRUE(at::equal(buffer, wanted)) << dtype;
      EXPECT_TRUE(std::ranges::none_of(grads, [](const auto& grad) { return grad.defined(); }));
      copy_out_all(layout, buffer, out, /*fuse=*/true);
      for (size_t i = 0; i < full.size(); ++i) {
        EXPECT_TRUE(at::equal(out[i], full[i].to(dtype).to(at::kFloat).flatten())) << dtype << i;
      }
    }
  }
}

// A rank's own chunk must be the slot that a gather of all ranks would put it into.
TEST_P(Layout, CopyChunkIsTheRanksSlot) {
  const FlatLayout layout = layout_for(GetParam());
  const auto full = params(at::kFloat);
  const at::Tensor buffer = expected_buffer(layout, full, at::kFloat);
  for (int64_t rank = 0; rank < layout.world; ++rank) {
    const at::Tensor part = at::full({layout.part}, NAN, at::kFloat);
    for (size_t i = 0; i < full.size(); ++i) {
      const ParamExtent& extent = layout.params[i];
      copy_chunk(extent, rank, full[i], part.narrow(0, extent.offset, extent.chunk));
    }
    EXPECT_TRUE(at::equal(part, buffer.narrow(0, rank * layout.part, layout.part))) << rank;
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, Layout, ::testing::Values(1, 2, 3, 4, 5, 7, 8, 16));

// A view over the wrong bytes reads a neighbour's parameter.
TEST(TypedView, CoversTheBytesAsked) {
  const at::Tensor bytes = at::empty({64}, at::kByte);
  const at::Tensor view = typed_view(bytes, at::kFloat, 16, {2, 3});
  EXPECT_EQ(view.data_ptr(), static_cast<char*>(bytes.data_ptr()) + 16);
  EXPECT_TRUE(view.is_contiguous());
  EXPECT_EQ(view.sizes(), at::IntArrayRef({2, 3}));
  EXPECT_THROW(typed_view(bytes, at::kFloat, 2, {1}), c10::Error);
}

}  // namespace
}  // namespace ppfsdp::fsdp
