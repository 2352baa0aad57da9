// A part is drawn as the whole would be: every op, dtype, size round the edges of normal_'s groups
// and of the blocks, every placement, consecutive draws; and without the whole's memory.
#include "src/dtensor/random_part.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "fmt/format.h"
#include "fmt/ranges.h"
#include "src/dtensor/dtensor.h"
#include "src/dtensor/testing.h"

namespace ppfsdp::dtensor {
namespace {

using testing::on_mesh;
using testing::S;
using Sizes = std::vector<int64_t>;

/// The block of random_part.cc: sizes round its multiples are the edges of the walk.
constexpr int64_t kBlock = 32768;

struct OpCase {
  const char* name;
  std::function<void(at::Tensor tensor, const at::Generator& generator)> run;
  std::vector<at::ScalarType> dtypes;
};

const std::vector<at::ScalarType> kFloats = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};
const std::vector<at::ScalarType> kNumbers = {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble,
                                              at::kLong,  at::kInt,      at::kByte};
const std::vector<at::ScalarType> kAll = {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble,
                                          at::kLong,  at::kInt,      at::kByte, at::kBool};

const std::vector<OpCase>& ops() {
  static const auto* all = new std::vector<OpCase>{
      {"normal_", [](at::Tensor t, const at::Generator& g) { t.normal_(0.25, 1.5, g); }, kFloats},
      {"uniform_", [](at::Tensor t, const at::Generator& g) { t.uniform_(-3, 2, g); }, kFloats},
      {"bernoulli_(p)", [](at::Tensor t, const at::Generator& g) { t.bernoulli_(0.3, g); }, kAll},
      {"exponential_", [](at::Tensor t, const at::Generator& g) { t.exponential_(2, g); }, kFloats},
      {"log_normal_", [](at::Tensor t, const at::Generator& g) { t.log_normal_(0, 1, g); },
       kFloats},
      {"cauchy_", [](at::Tensor t, const at::Generator& g) { t.cauchy_(1, 2, g); }, kFloats},
      {"geometric_", [](at::Tensor t, const at::Generator& g) { t.geometric_(0.2, g); }, kNumbers},
      {"random_", [](at::Tensor t, const at::Generator& g) { t.random_(g); }, kAll},
      {"random_(to)", [](at::Tensor t, const at::Generator& g) { t.random_(100, g); }, kNumbers},
      {"random_(from, to)",
       [](at::Tensor t, const at::Generator& g) { t.random_(-5, int64_t{1} << 40, g); },
       {at::kLong, at::kDouble}},
  };
  return *all;
}

at::Generator generator(uint64_t seed) { return at::detail::createCPUGenerator(seed); }

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.contiguous();
  const at::Tensor y = b.contiguous();
  return x.sizes() == y.sizes() && x.scalar_type() == y.scalar_type() &&
         (x.nbytes() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0);
}

/// Draws thrice into `sharded` and into `plain`, with draws between that leave a normal value in
/// the generator, and compares this rank's parts and the generators. "" or what differs.
std::string difference(const OpCase& op, const at::Tensor& sharded, const at::Tensor& plain,
                       uint64_t seed) {
  at::Generator got = generator(seed);
  at::Generator wanted = generator(seed);
  const at::Tensor few = at::empty({3});
  const Spec& spec = *spec_of(sharded);
  const std::vector<ShardRange> ranges =
      local_ranges(spec.sizes, *spec.mesh, spec.placements, spec.mesh->coordinates());
  for (int round = 0; round < 3; ++round) {
    op.run(sharded, got);
    op.run(plain, wanted);
    at::Tensor part = plain;
    for (size_t dim = 0; dim < ranges.size(); ++dim) {
      part = part.narrow(static_cast<int64_t>(dim),
                         ranges[dim].length == 0 ? 0 : ranges[dim].offset, ranges[dim].length);
    }
    const std::string what = fmt::format("{} of {} {}, draw {}", op.name,
                                         toString(plain.scalar_type()), spec.str(), round);
    if (!same_bits(local_of(sharded), part)) {
      return what + ": the values differ";
    }
    if (!at::equal(got.get_state(), wanted.get_state())) {
      return what + ": the generators differ";
    }
    few.normal_(0, 1, got);
    few.normal_(0, 1, wanted);
  }
  return "";
}

at::Tensor sharded_zeros(const Sizes& sizes, at::ScalarType dtype, const mesh::DeviceMeshPtr& mesh,
                         const Placements& placements) {
  const Sizes local = local_sizes(sizes, *mesh, placements, mesh->coordinates());
  return from_local(at::zeros(local, dtype), mesh, placements, sizes);
}

void compare_all(const Sizes& mesh_shape, const std::vector<Placements>& placements,
                 const std::vector<Sizes>& all_sizes, const std::vector<OpCase>& cases) {
  on_mesh(mesh_shape, [&](const mesh::DeviceMeshPtr& mesh) {
    uint64_t seed = 1;
    for (const OpCase& op : cases) {
      for (const at::ScalarType dtype : op.dtypes) {
        for (const Sizes& sizes : all_sizes) {
          for (const Placements& own : placements) {
            const std::string what = difference(op, sharded_zeros(sizes, dtype, mesh, own),
                                                at::zeros(sizes, dtype), seed++);
            ASSERT_EQ(what, "");
          }
        }
      }
    }
  });
}

TEST(RandomPart, every_op_and_dtype_on_every_small_size) {
  std::vector<Sizes> sizes;
  for (const int64_t n : {0, 1, 2, 7, 15, 16, 17, 31, 32, 33, 47, 48, 100}) {
    sizes.push_back({n});
  }
  for (int64_t world = 1; world <= 8; ++world) {
    compare_all({world}, {{S(0)}}, sizes, ops());
  }
}

// Sizes at which the walk goes from one piece to two, and at which the last piece is longest.
TEST(RandomPart, sizes_round_the_blocks) {
  std::vector<Sizes> sizes;
  for (const int64_t n : {kBlock - 1, kBlock, kBlock + 1, kBlock + 15, kBlock + 16, kBlock + 17,
                          2 * kBlock - 1, 2 * kBlock, 2 * kBlock + 15, 3 * kBlock + 31}) {
    sizes.push_back({n});
  }
  std::vector<OpCase> cases = ops();
  for (OpCase& op : cases) {
    op.dtypes.resize(std::min<size_t>(op.dtypes.size(), 2));
  }
  for (const int64_t world : {1, 3, 8}) {
    compare_all({world}, {{S(0)}}, sizes, cases);
  }
}

std::vector<OpCase> few_ops() {
  return {{ops()[0].name, ops()[0].run, {at::kFloat, at::kBFloat16}},
          {ops()[1].name, ops()[1].run, {at::kDouble}},
          {ops()[4].name, ops()[4].run, {at::kFloat}}};
}

TEST(RandomPart, every_placement_on_one_mesh_dim) {
  for (const int64_t world : {1, 2, 3, 5, 8}) {
    compare_all({world}, {{S(0)}, {S(1)}, {S(2)}, {testing::kR}},
                {{4, 6, 8}, {5, 7, 9}, {1, 3, 5}, {2, 1, 17}, {0, 4, 4}, {3, 5, 1}, {9, 64, 91}},
                few_ops());
  }
}

TEST(RandomPart, every_placement_on_two_mesh_dims) {
  const Placement strided = Placement::strided_shard(0, 3);
  for (const Sizes& mesh : {Sizes{2, 3}, Sizes{3, 3}, Sizes{1, 3}}) {
    compare_all(mesh,
                {{S(0), S(0)},
                 {S(0), S(1)},
                 {S(1), S(0)},
                 {S(1), S(1)},
                 {testing::kR, S(0)},
                 {S(1), testing::kR},
                 {testing::kR, testing::kR},
                 {strided, S(0)}},
                {{4, 6}, {5, 7}, {1, 1}, {7, 2}, {13, 17}, {301, 211}}, few_ops());
  }
}

// Runs that are longer than what is skipped, shorter, and of one element.
TEST(RandomPart, columns_of_long_and_short_rows) {
  compare_all({8}, {{S(0)}, {S(1)}}, {{17, 16411}, {40, 9000}, {12000, 8}, {70001, 1}, {1, 70001}},
              few_ops());
}

// What is skipped is long enough for the jump: values and state after it.
TEST(RandomPart, millions_of_elements) {
  on_mesh({3}, [&](const mesh::DeviceMeshPtr& mesh) {
    const Sizes sizes = {12000005};
    for (const OpCase& op : {OpCase{ops()[0].name, ops()[0].run, {at::kFloat}},
                             OpCase{ops()[2].name, ops()[2].run, {at::kByte}}}) {
      const at::ScalarType dtype = op.dtypes.front();
      EXPECT_EQ(
          difference(op, sharded_zeros(sizes, dtype, mesh, {S(0)}), at::zeros(sizes, dtype), 42),
          "");
    }
  });
}

// A plain tensor that is not contiguous is drawn in the order of its memory, normal_ by another
// algorithm; the DTensor of the same strides must follow.
TEST(RandomPart, transposed_tensors) {
  for (const int64_t world : {1, 3, 4}) {
    on_mesh({world}, [&](const mesh::DeviceMeshPtr& mesh) {
      for (const Placement& placement : {S(0), S(1), S(2), testing::kR}) {
        for (const Sizes& sizes : {Sizes{3, 5, 7}, Sizes{1, 2, 3}, Sizes{61, 67, 29}}) {
          for (const OpCase& op : few_ops()) {
            const at::ScalarType dtype = op.dtypes.front();
            const at::Tensor sharded = sharded_zeros(sizes, dtype, mesh, {placement});
            const at::Tensor plain = at::zeros(sizes, dtype);
            EXPECT_EQ(difference(op, sharded.transpose(0, 2), plain.transpose(0, 2), 3), "");
            EXPECT_EQ(difference(op, sharded.permute({1, 2, 0}), plain.permute({1, 2, 0}), 4), "");
          }
        }
      }
    });
  }
}

// A part inside a larger tensor: what lies between its rows stays.
TEST(RandomPart, gaps_in_the_local_memory_are_left_alone) {
  on_mesh({2}, [&](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor around = at::full({6, 10}, 7.0f);
    const at::Tensor sharded = from_local(around.narrow(1, 2, 5), mesh, {S(0)});
    const Spec& spec = *spec_of(sharded);
    ASSERT_EQ(spec.strides, (Sizes{10, 1}));
    const at::Tensor plain = at::as_strided(at::zeros({12 * 10}), spec.sizes, spec.strides);
    EXPECT_EQ(difference(ops()[0], sharded, plain, 8), "");
    EXPECT_TRUE(at::equal(around.narrow(1, 0, 2), at::full({6, 2}, 7.0f)));
    EXPECT_TRUE(at::equal(around.narrow(1, 7, 3), at::full({6, 3}, 7.0f)));
  });
}

TEST(RandomPart, complex_values) {
  on_mesh({3}, [&](const mesh::DeviceMeshPtr& mesh) {
    for (const int64_t n : {3, 8, 9, 15, 40000, 40009}) {
      for (const at::ScalarType dtype : {at::kComplexFloat, at::kComplexDouble}) {
        EXPECT_EQ(
            difference(ops()[0], sharded_zeros({n}, dtype, mesh, {S(0)}), at::zeros({n}, dtype), 5),
            "");
      }
    }
  });
}

// Otherwise drawing on in parts would be wrong, and the rules in random_part.h would have to
// change: this is what a LibTorch with MKL's random streams would fail.
TEST(RandomPart, this_libtorch_draws_serially) {
  for (const OpCase& op : ops()) {
    const at::ScalarType dtype = op.dtypes.front();
    const at::Generator once = generator(11);
    const at::Generator pieces = generator(11);
    const at::Tensor whole = at::zeros({4096}, dtype);
    const at::Tensor parts = at::zeros({4096}, dtype);
    op.run(whole, once);
    op.run(parts.narrow(0, 0, 1600), pieces);
    op.run(parts.narrow(0, 1600, 2496), pieces);
    EXPECT_TRUE(same_bits(whole, parts)) << op.name;
    EXPECT_TRUE(at::equal(once.get_state(), pieces.get_state())) << op.name;
  }
}

TEST(RandomPart, a_failed_draw_leaves_the_generator_alone) {
  on_mesh({2}, [&](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor sharded = sharded_zeros({10}, at::kFloat, mesh, {S(0)});
    const at::Generator got = generator(1);
    const at::Tensor before = got.get_state();
    EXPECT_ANY_THROW(sharded.normal_(0, -1, got));
    EXPECT_ANY_THROW(sharded.bernoulli_(2, got));
    EXPECT_ANY_THROW(sharded_zeros({10}, at::kLong, mesh, {S(0)}).uniform_(0, 1, got));
    EXPECT_TRUE(at::equal(got.get_state(), before));
    sharded.normal_(0, 1, got);  // it is not left locked
  });
}

/// Counts the bytes that the allocator below has handed out.
class CountingAllocator final : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator* base) : base_(base) {}
  c10::DataPtr allocate(size_t bytes) override {
    const size_t now = live_ += bytes;
    size_t peak = peak_;
    while (now > peak && !peak_.compare_exchange_weak(peak, now)) {
    }
    auto* block = new Block{base_->allocate(bytes), bytes};
    return {block->data.get(), block, &release, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  static void start() { peak_ = live_.load(); }
  static size_t peak_above(size_t bytes) { return peak_ - bytes; }
  static size_t live() { return live_; }

 private:
  struct Block {
    c10::DataPtr data;
    size_t bytes;
  };
  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    live_ -= block->bytes;
    delete block;
  }
  c10::Allocator* base_;
  static inline std::atomic<size_t> live_ = 0;
  static inline std::atomic<size_t> peak_ = 0;
};

// 2^24 elements, 64 MiB in float, of which this rank holds a sixteenth: nothing may be made in the
// size of the whole, nor of the part.
TEST(RandomPart, memory_is_that_of_a_block) {
  c10::Allocator* before = c10::GetCPUAllocator();
  CountingAllocator counting(before);
  c10::SetCPUAllocator(&counting, /*priority=*/100);
  on_mesh({4, 4}, [&](const mesh::DeviceMeshPtr& mesh) {
    if (mesh->coordinates() != Sizes{2, 1}) {
      return;
    }
    const Sizes sizes = {int64_t{1} << 16, 16, 16};
    const Placements placements = {S(1), S(2)};
    for (const OpCase& op : few_ops()) {
      const at::Tensor sharded = sharded_zeros(sizes, op.dtypes.front(), mesh, placements);
      const size_t live = CountingAllocator::live();
      CountingAllocator::start();
      op.run(sharded, generator(1));
      EXPECT_LT(CountingAllocator::peak_above(live), 16 * kBlock) << op.name;
      EXPECT_GE(CountingAllocator::peak_above(live), size_t{kBlock}) << "nothing was counted";
    }
  });
  c10::SetCPUAllocator(before, /*priority=*/100);
}

}  // namespace
}  // namespace ppfsdp::dtensor
