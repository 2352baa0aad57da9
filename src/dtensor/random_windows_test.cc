// A part drawn as a GPU draws the whole, by windows. No GPU is needed: a generator with the offset
// of CUDA's, and a function of seed, offset and element, which philox_cuda_test.cc compares with
// values that a GPU gave, stand in for ATen's kernels.
#include <ATen/core/Generator.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "fmt/format.h"
#include "fmt/ranges.h"
#include "src/dtensor/philox_cuda.h"
#include "src/dtensor/random_part.h"
#include "src/dtensor/sharding.h"
#include "src/dtensor/testing.h"

namespace ppfsdp::dtensor {
namespace {

using testing::kR;
using testing::on_mesh;
using testing::S;
using Sizes = std::vector<int64_t>;

constexpr uint64_t kSeed = 77;
constexpr uint64_t kOffset = 12;

/// Keeps a seed and an offset as CUDA's generator does.
class PhiloxGenerator : public c10::GeneratorImpl {
 public:
  PhiloxGenerator(uint64_t seed, uint64_t offset)
      : GeneratorImpl(c10::Device(c10::kCPU), c10::DispatchKeySet(c10::DispatchKey::CPU)),
        seed_(seed),
        offset_(offset) {}

  void set_current_seed(uint64_t seed) override { seed_ = seed; }
  uint64_t current_seed() const override { return seed_; }
  void set_offset(uint64_t offset) override {
    TORCH_CHECK(offset % 4 == 0, "offset ", offset);
    offset_ = offset;
  }
  uint64_t get_offset() const override { return offset_; }
  uint64_t seed() override { return seed_; }
  void set_state(const c10::TensorImpl&) override { TORCH_CHECK(false, "set_state"); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    TORCH_CHECK(false, "get_state");
  }

 private:
  PhiloxGenerator* clone_impl() const override { return new PhiloxGenerator(seed_, offset_); }

  uint64_t seed_;
  uint64_t offset_;
};

at::Generator generator() { return at::make_generator<PhiloxGenerator>(kSeed, kOffset); }

/// What ATen's op does: draws at the generator's offset, which it moves on, under its lock.
RandomOp kernel(const Distribution& distribution, const PhiloxGrid& grid, int64_t& most) {
  const auto fill = [=, &most](const at::Tensor& tensor, const at::Generator& generator) {
    at::Generator own = generator;
    const std::lock_guard lock(own.mutex());
    const PhiloxState state{own.current_seed(), own.get_offset()};
    const int64_t numel = tensor.numel();
    tensor.copy_(
        philox_cuda_values(distribution, tensor.scalar_type(), numel, state, grid, 0, numel));
    own.set_offset(
        state.offset +
        philox_layout(distribution, tensor.scalar_type(), numel, grid).offset_increment());
    most = std::max(most, numel);
  };
  return {"op_", fill, distribution};
}

Sizes contiguous(const Sizes& sizes) {
  Sizes strides(sizes.size(), 1);
  for (size_t dim = sizes.size(); dim-- > 1;) strides[dim - 1] = strides[dim] * sizes[dim];
  return strides;
}

struct Case {
  Sizes mesh;
  Placements placements;
  Sizes sizes;
  Sizes strides;
  PhiloxGrid grid;
  Distribution distribution;
  at::ScalarType dtype;
};

void expect_as_the_whole(const Case& c) {
  SCOPED_TRACE(
      fmt::format("{} of sizes [{}], strides [{}], {} on mesh [{}], grid of {} times {}, {}",
                  to_string(c.distribution), fmt::join(c.sizes, ", "), fmt::join(c.strides, ", "),
                  to_string(c.placements), fmt::join(c.mesh, ", "), c.grid.multiprocessors,
                  c.grid.threads_per_multiprocessor, c10::toString(c.dtype)));
  const int64_t numel = std::accumulate(c.sizes.begin(), c.sizes.end(), int64_t{1},
                                        [](int64_t a, int64_t b) { return a * b; });
  const at::Tensor whole =
      philox_cuda_values(c.distribution, c.dtype, numel, {kSeed, kOffset}, c.grid, 0, numel)
          .as_strided(c.sizes, c.strides);
  const PhiloxLayout layout = philox_layout(c.distribution, c.dtype, numel, c.grid);
  on_mesh(c.mesh, [&](const mesh::DeviceMeshPtr& mesh) {
    const std::vector<ShardRange> ranges =
        local_ranges(c.sizes, *mesh, c.placements, mesh->coordinates());
    at::Tensor wanted = whole;
    for (size_t dim = 0; dim < ranges.size(); ++dim) {
      wanted = wanted.narrow(static_cast<int64_t>(dim), ranges[dim].offset, ranges[dim].length);
    }
    // One that is laid out as it comes, and one with gaps.
    const at::Tensor gaps =
        at::zeros(wanted.sizes(), c.dtype).unsqueeze(-1).repeat_interleave(2, -1).select(-1, 1);
    for (const at::Tensor& local : {at::zeros(wanted.sizes(), c.dtype), gaps}) {
      at::Generator own = generator();
      int64_t most = 0;
      RandomPart("op_", *mesh, c.placements, c.sizes, c.strides)
          .draw_by_windows(local, kernel(c.distribution, c.grid, most), own, c.grid);
      EXPECT_TRUE(at::equal(local, wanted));
      EXPECT_EQ(own.get_offset(), kOffset + layout.offset_increment());
      EXPECT_EQ(own.current_seed(), kSeed);
      // Not the whole in a scratch tensor.
      EXPECT_LE(most, c.grid.multiprocessors * (c.grid.threads_per_multiprocessor / 256) * 256 * 4);
    }
  });
}

// Shards of the first dim, of others, of two, replicas, uneven and empty ones, transposed tensors;
// of less than one round of the grid, of one, and of many.
TEST(RandomWindows, APartIsDrawnAsTheWhole) {
  const std::vector<std::pair<Sizes, Placements>> meshes = {
      {{3}, {S(0)}},        {{4}, {S(1)}},          {{2, 2}, {S(0), S(1)}},
      {{2, 2}, {kR, S(0)}}, {{2, 2}, {S(0), S(0)}}, {{2}, {kR}},
  };
  const std::vector<Sizes> sizes = {{2, 3}, {7, 50}, {64, 33}, {1, 4096}, {2, 5, 700}, {3000, 3}};
  for (const PhiloxGrid& grid : {PhiloxGrid{1, 256}, PhiloxGrid{2, 512}, PhiloxGrid{132, 2048}}) {
    for (const auto& [mesh, placements] : meshes) {
      for (const Sizes& size : sizes) {
        expect_as_the_whole(
            {mesh, placements, size, contiguous(size), grid, Uniform{-1, 2}, at::kFloat});
      }
      Sizes transposed = contiguous({40, 60});
      std::swap(transposed[0], transposed[1]);
      expect_as_the_whole(
          {mesh, placements, {60, 40}, transposed, grid, Uniform{-1, 2}, at::kFloat});
    }
  }
}

// Every op, and dtypes in which a draw gives four values, or two.
TEST(RandomWindows, EveryOpAndDtype) {
  const std::vector<std::pair<Distribution, at::ScalarType>> ops = {
      {Uniform{-1, 2}, at::kDouble},  {Uniform{-1, 2}, at::kBFloat16},
      {Normal{1, 3}, at::kFloat},     {Normal{1, 3}, at::kDouble},
      {Normal{1, 3}, at::kHalf},      {Bernoulli{0.3}, at::kBool},
      {Bernoulli{0.3}, at::kFloat},   {Exponential{2}, at::kFloat},
      {RandomInt{-5, 100}, at::kInt}, {RandomInt{-5, uint64_t{1} << 40}, at::kLong},
      {Random{}, at::kByte},          {Random{}, at::kLong},
  };
  for (const auto& [distribution, dtype] : ops) {
    for (const Placements& placements : {Placements{S(0)}, Placements{S(1)}}) {
      expect_as_the_whole({{3}, placements, {50, 70}, {70, 1}, {1, 512}, distribution, dtype});
    }
  }
}

// What cannot be drawn so says so, and leaves the generator alone.
TEST(RandomWindows, Unsupported) {
  on_mesh({2}, [&](const mesh::DeviceMeshPtr& mesh) {
    const RandomPart part("op_", *mesh, {S(0)}, {4, 3}, {3, 1});
    at::Generator own = generator();
    int64_t most = 0;
    RandomOp op = kernel(Normal{}, {1, 256}, most);
    EXPECT_THROW(part.draw_by_windows(at::zeros({2, 3}, at::kComplexFloat), op, own, {1, 256}),
                 c10::NotImplementedError);
    EXPECT_THROW(part.draw_by_windows(at::zeros({2, 3}), op, own, {0, 0}), c10::Error);
    op.distribution.reset();
    EXPECT_THROW(part.draw_by_windows(at::zeros({2, 3}), op, own, {1, 256}),
                 c10::NotImplementedError);
    EXPECT_EQ(own.get_offset(), kOffset);
    EXPECT_EQ(most, 0);
  });
}

}  // namespace
}  // namespace ppfsdp::dtensor
