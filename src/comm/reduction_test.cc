// reduce_range against a literal fold by LibTorch's own operations, element order by element order,
// and against cases worked out by hand.
#include "src/comm/reduction.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace ppfsdp::comm {
namespace {

constexpr ReductionOrder kOrders[] = {ReductionOrder::kRankOrder, ReductionOrder::kGlooRing,
                                      ReductionOrder::kNcclRing, ReductionOrder::kTree};

at::Tensor combine(const ReduceOp& op, const at::Tensor& a, const at::Tensor& b) {
  if (op.kind == ReduceOp::Kind::kMin) return at::minimum(a, b);
  if (op.kind == ReduceOp::Kind::kMax) return at::maximum(a, b);
  return a.add(b);
}

at::Tensor tree_fold(const ReduceOp& op, const std::vector<at::Tensor>& x) {
  if (x.size() == 1) return x[0];
  const auto middle = x.begin() + static_cast<int64_t>(x.size() + 1) / 2;
  return combine(op, tree_fold(op, {x.begin(), middle}), tree_fold(op, {middle, x.end()}));
}

/// Ranks in the order in which chunk `q` folds them.
std::vector<int> ring_ranks(ReductionOrder order, int n, int q) {
  std::vector<int> ranks;
  for (int i = 1; i <= n; ++i) {
    if (order == ReductionOrder::kRankOrder) ranks.push_back(i - 1);
    if (order == ReductionOrder::kGlooRing) ranks.push_back(((q - i) % n + n) % n);
    if (order == ReductionOrder::kNcclRing) ranks.push_back((q + i) % n);
  }
  return ranks;
}

/// The whole reduction, chunks of `chunk` elements, by LibTorch's operations.
at::Tensor literal(ReductionOrder order, const ReduceOp& op, std::vector<at::Tensor> x,
                   int64_t chunk) {
  const int n = static_cast<int>(x.size());
  const int64_t numel = x[0].numel();
  // NCCL averages by products with 1 / n, and has factors in the tensor's dtype.
  const bool nccl = order == ReductionOrder::kNcclRing;
  if (op.kind == ReduceOp::Kind::kPremulSum || (nccl && op.kind == ReduceOp::Kind::kAvg)) {
    at::Tensor factor =
        at::full({}, op.kind == ReduceOp::Kind::kAvg ? 1.0 / n : op.factor, at::kDouble);
    if (nccl) factor = factor.to(x[0].scalar_type()).to(at::kDouble);
    for (at::Tensor& value : x) value = value.mul(factor.item());
  }
  at::Tensor result;
  if (order == ReductionOrder::kTree) {
    result = tree_fold(op, x);
  } else {
    std::vector<at::Tensor> parts;
    for (int q = 0; q * chunk < numel; ++q) {
      const int64_t begin = q * chunk;
      const int64_t count = std::min(chunk, numel - begin);
      at::Tensor part;
      for (const int rank : ring_ranks(order, n, q)) {
        const at::Tensor piece = x[rank].narrow(0, begin, count);
        part = part.defined() ? combine(op, part, piece) : piece;
      }
      parts.push_back(part);
    }
    result = parts.empty() ? at::empty_like(x[0]) : at::cat(parts);
  }
  return op.kind == ReduceOp::Kind::kAvg && !nccl ? result.div(n) : result.clone();
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// The chunk of a buffer small enough for the closed form of Gloo's rule (2 n MiB at most).
int64_t chunk_of(ReductionOrder order, int64_t numel, int n) {
  return order == ReductionOrder::kGlooRing ? 2 * ceil_div(numel, 2 * n)
                                            : std::max<int64_t>(1, ceil_div(numel, n));
}

std::vector<at::Tensor> random_inputs(int n, int64_t numel, at::ScalarType dtype, uint64_t seed) {
  auto generator = at::detail::createCPUGenerator(seed);
  std::vector<at::Tensor> inputs;
  for (int rank = 0; rank < n; ++rank) {
    if (c10::isIntegralType(dtype, false)) {
      inputs.push_back(at::randint(0, 127, {numel}, generator, dtype));
    } else {
      // Of very different sizes, so that nearly every order of addition gives other bits.
      const at::Tensor scale = at::randn({numel}, generator).mul(4).exp();
      inputs.push_back(at::randn({numel}, generator).mul(scale).to(dtype));
    }
  }
  return inputs;
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         (a.numel() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0);
}

at::Tensor reduced(ReductionOrder order, const ReduceOp& op, const std::vector<at::Tensor>& inputs,
                   int64_t begin, int64_t end) {
  const at::Tensor output = at::empty({end - begin}, inputs[0].options());
  reduce_range(order, op, inputs, begin, end, output);
  return output;
}

TEST(ReduceRange, equals_a_literal_fold_bit_for_bit) {
  const std::vector<ReduceOp> ops = {ReduceOp::sum(), ReduceOp::avg(), ReduceOp::premul_sum(0.3),
                                     ReduceOp::min(), ReduceOp::max()};
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    for (const int n : {1, 2, 3, 4, 5, 7, 8, 13}) {
      // Around the sizes where chunks become short or empty, and across the blocks of the loop.
      for (const int64_t numel : {0, 1, 2, 5, 7, 16, 63, 64, 2048 * 3 + 1}) {
        const auto inputs = random_inputs(n, numel, dtype, n * 1000 + numel);
        for (const ReductionOrder order : kOrders) {
          for (const ReduceOp& op : ops) {
            EXPECT_TRUE(same_bits(reduced(order, op, inputs, 0, numel),
                                  literal(order, op, inputs, chunk_of(order, numel, n))))
                << to_string(order) << " " << to_string(op) << " " << dtype << " n=" << n
                << " numel=" << numel;
          }
        }
      }
    }
  }
}

TEST(ReduceRange, integers_wrap_and_order_does_not_matter) {
  for (const at::ScalarType dtype : {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong}) {
    const auto inputs = random_inputs(5, 100, dtype, 7);
    for (const ReduceOp& op : {ReduceOp::sum(), ReduceOp::min(), ReduceOp::max()}) {
      const at::Tensor expected = literal(ReductionOrder::kRankOrder, op, inputs, 100);
      for (const ReductionOrder order : kOrders) {
        EXPECT_TRUE(same_bits(reduced(order, op, inputs, 0, 100), expected))
            << to_string(order) << " " << to_string(op) << " " << dtype;
      }
    }
  }
  const auto most = at::full({1}, std::numeric_limits<int64_t>::max(), at::kLong);
  EXPECT_EQ(
      reduced(ReductionOrder::kRankOrder, ReduceOp::sum(), {most, most}, 0, 1)[0].item<int64_t>(),
      -2);
}

TEST(ReduceRange, a_part_has_the_bits_of_the_whole) {
  // A reduce-scatter's slice must not depend on being computed alone.
  const auto inputs = random_inputs(5, 5000, at::kBFloat16, 3);
  for (const ReductionOrder order : kOrders) {
    const at::Tensor whole = reduced(order, ReduceOp::avg(), inputs, 0, 5000);
    for (const auto& [begin, end] : std::vector<std::pair<int64_t, int64_t>>{
             {0, 1}, {999, 1003}, {1000, 2000}, {1, 4999}, {4999, 5000}, {77, 77}}) {
      EXPECT_TRUE(same_bits(reduced(order, ReduceOp::avg(), inputs, begin, end),
                            whole.narrow(0, begin, end - begin)))
          << to_string(order) << " [" << begin << ", " << end << ")";
    }
  }
}

TEST(ReduceSlices, has_the_bits_of_the_whole_from_the_slices_alone) {
  const auto inputs = random_inputs(5, 5000, at::kFloat, 4);
  for (const ReductionOrder order : kOrders) {
    const at::Tensor whole = reduced(order, ReduceOp::premul_sum(0.3), inputs, 0, 5000);
    for (const auto& [begin, count] : std::vector<std::pair<int64_t, int64_t>>{
             {0, 1000}, {999, 3}, {4999, 1}, {5000, 0}, {0, 5000}}) {
      std::vector<at::Tensor> slices;
      for (const at::Tensor& input : inputs) {
        slices.push_back(input.narrow(0, begin, count).clone());
      }
      const at::Tensor output = at::empty({count});
      reduce_slices(order, ReduceOp::premul_sum(0.3), slices, 5000, begin, output);
      EXPECT_TRUE(same_bits(output, whole.narrow(0, begin, count)))
          << to_string(order) << " from " << begin << ", " << count << " elements";
    }
  }
  const at::Tensor output = at::empty({10});
  const at::Tensor slice = at::ones({10});
  const auto refused = [&](int64_t total, int64_t begin) {
    EXPECT_THROW(
        reduce_slices(ReductionOrder::kTree, ReduceOp::sum(), {slice, slice}, total, begin, output),
        c10::Error);
  };
  refused(20, 11);
  refused(20, -1);
}

TEST(ReduceRange, works_in_place) {
  for (const ReductionOrder order : kOrders) {
    auto inputs = random_inputs(4, 5000, at::kFloat, 11);
    const at::Tensor expected = reduced(order, ReduceOp::sum(), inputs, 0, 5000);
    reduce_range(order, ReduceOp::sum(), inputs, 0, 5000, inputs[2]);
    EXPECT_TRUE(same_bits(inputs[2], expected)) << to_string(order);
    // Each rank's slice into its own slot, as an in-place reduce-scatter.
    inputs = random_inputs(4, 5000, at::kFloat, 11);
    for (int rank = 0; rank < 4; ++rank) {
      const at::Tensor slot = inputs[rank].narrow(0, rank * 1250, 1250);
      reduce_range(order, ReduceOp::sum(), inputs, rank * 1250, (rank + 1) * 1250, slot);
      EXPECT_TRUE(same_bits(slot, expected.narrow(0, rank * 1250, 1250))) << to_string(order);
    }
  }
}

/// One value a rank, the same at every element.
std::vector<at::Tensor> constants(const std::vector<double>& values, int64_t numel,
                                  at::ScalarType dtype) {
  std::vector<at::Tensor> inputs;
  for (const double value : values) inputs.push_back(at::full({numel}, value, dtype));
  return inputs;
}

TEST(ReduceRange, orders_by_hand) {
  // In fp32 1e8 + 1 = 1e8, so 1e8, 1, -1e8 give 1 only when 1 comes last.
  const auto x = constants({1e8, 1, -1e8}, 6, at::kFloat);
  const auto fold = [&](ReductionOrder order) {
    const at::Tensor y = reduced(order, ReduceOp::sum(), x, 0, 6);
    return std::vector<float>(y.const_data_ptr<float>(), y.const_data_ptr<float>() + 6);
  };
  // (x0 + x1) + x2.
  EXPECT_EQ(fold(ReductionOrder::kRankOrder), (std::vector<float>{0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(fold(ReductionOrder::kTree), (std::vector<float>{0, 0, 0, 0, 0, 0}));
  // Chunks of two: (x2 + x1) + x0, (x0 + x2) + x1, (x1 + x0) + x2.
  EXPECT_EQ(fold(ReductionOrder::kGlooRing), (std::vector<float>{0, 0, 1, 1, 0, 0}));
  // Chunks of two: (x1 + x2) + x0, (x2 + x0) + x1, (x0 + x1) + x2.
  EXPECT_EQ(fold(ReductionOrder::kNcclRing), (std::vector<float>{0, 0, 1, 1, 0, 0}));
  // Four ranks tell the two rings apart: chunk 0 is ((x3 + x2) + x1) + x0 for Gloo's and
  // ((x1 + x2) + x3) + x0 for NCCL's; a tree adds x0 + x1 and x2 + x3.
  const auto y = constants({0, 1e8, -1e8, 1}, 1, at::kFloat);
  const auto first = [&](ReductionOrder order) {
    return reduced(order, ReduceOp::sum(), y, 0, 1)[0].item<float>();
  };
  EXPECT_EQ(first(ReductionOrder::kGlooRing), 0.0f);
  EXPECT_EQ(first(ReductionOrder::kNcclRing), 1.0f);
  EXPECT_EQ(first(ReductionOrder::kRankOrder), 1.0f);
  EXPECT_EQ(first(ReductionOrder::kTree), 0.0f);
}

TEST(ReduceRange, bf16_rounds_after_every_addition) {
  // 256 + 1 rounds back to 256 in bf16; 1 + 1 + 256 does not.
  const auto x = constants({256, 1, 1}, 1, at::kBFloat16);
  const auto sum = [&](ReductionOrder order) {
    return reduced(order, ReduceOp::sum(), x, 0, 1)[0].item<float>();
  };
  EXPECT_EQ(sum(ReductionOrder::kRankOrder), 256.0f);
  EXPECT_EQ(sum(ReductionOrder::kGlooRing), 258.0f);
}

TEST(ReduceRange, nccl_has_factors_in_the_dtype) {
  // 0.3 is 0.30078125 in bf16: 100 * that rounds to 30.125, 100 * 0.3 to 30.
  const auto x = constants({100}, 1, at::kBFloat16);
  const auto product = [&](ReductionOrder order) {
    return reduced(order, ReduceOp::premul_sum(0.3), x, 0, 1)[0].item<float>();
  };
  EXPECT_EQ(product(ReductionOrder::kNcclRing), 30.125f);
  EXPECT_EQ(product(ReductionOrder::kTree), 30.0f);
}

TEST(ReduceRange, gloo_cuts_by_segments_not_by_ranks) {
  const auto x = constants({1e8, 1, -1e8}, 4, at::kFloat);
  const at::Tensor small = reduced(ReductionOrder::kGlooRing, ReduceOp::sum(), x, 0, 4);
  // ceil(4 / 6) = 1 element a segment, 2 a chunk: chunk 0 is [0, 2), chunk 1 [2, 4), chunk 2 empty.
  EXPECT_EQ(small[1].item<float>(), 0.0f);
  EXPECT_EQ(small[2].item<float>(), 1.0f);
  EXPECT_EQ(small[3].item<float>(), 1.0f);
  // 2,000,001 floats, 8,000,004 bytes: 8 segments of at most 1 MiB, rounded up to 9, three a rank;
  // a segment is ceil(8,000,004 / 9) = 888,890 bytes, rounded up to 888,892; a chunk 666,669
  // floats. Two segments a rank would give 666,668.
  const auto y = constants({1e8, 1, -1e8}, 2'000'001, at::kFloat);
  const at::Tensor large = reduced(ReductionOrder::kGlooRing, ReduceOp::sum(), y, 666'667, 666'671);
  EXPECT_EQ(large[0].item<float>(), 0.0f);
  EXPECT_EQ(large[1].item<float>(), 0.0f);
  EXPECT_EQ(large[2].item<float>(), 1.0f);
  EXPECT_EQ(large[3].item<float>(), 1.0f);
}

TEST(ReduceRange, avg_divides_the_sum_once_and_for_nccl_multiplies_before) {
  // 3 * (1 / 3) is 1 after rounding, but 5 * (1 / 3) and 5 / 3 differ in the last bit of a float.
  const auto x = constants({5, 0, 0}, 1, at::kFloat);
  for (const ReductionOrder order : kOrders) {
    const bool nccl = order == ReductionOrder::kNcclRing;
    EXPECT_EQ(reduced(order, ReduceOp::avg(), x, 0, 1)[0].item<float>(),
              nccl ? 5.0f * (1.0f / 3.0f) : 5.0f / 3.0f);
  }
  ASSERT_NE(5.0f * (1.0f / 3.0f), 5.0f / 3.0f);
}

TEST(ReduceRange, a_nan_of_any_rank_is_seen) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    for (int bad = 0; bad < 3; ++bad) {
      std::vector<double> values = {1, 2, 3};
      values[bad] = nan;
      for (const ReductionOrder order : kOrders) {
        for (const ReduceOp& op : {ReduceOp::sum(), ReduceOp::avg(), ReduceOp::premul_sum(0.5),
                                   ReduceOp::min(), ReduceOp::max()}) {
          const double result =
              reduced(order, op, constants(values, 1, dtype), 0, 1)[0].item<double>();
          EXPECT_NE(result, result) << to_string(op) << " " << to_string(order) << " " << dtype;
        }
      }
    }
  }
}

TEST(ReduceRange, refuses_what_does_not_fit) {
  const auto x = constants({1, 2}, 4, at::kFloat);
  const at::Tensor output = at::empty({4});
  const auto order = ReductionOrder::kTree;
  const auto op = ReduceOp::sum();
  EXPECT_THROW(reduce_range(order, op, {}, 0, 4, output), c10::Error);
  EXPECT_THROW(reduce_range(order, op, x, 0, 3, output), c10::Error);
  EXPECT_THROW(reduce_range(order, op, x, -1, 3, output), c10::Error);
  EXPECT_THROW(reduce_range(order, op, x, 1, 5, output), c10::Error);
  EXPECT_THROW(reduce_range(order, op, x, 0, 4, output.to(at::kDouble)), c10::Error);
  EXPECT_THROW(reduce_range(order, op, {x[0], at::empty({5})}, 0, 4, output), c10::Error);
  EXPECT_THROW(reduce_range(order, op, {x[0], x[1].to(at::kHalf)}, 0, 4, output), c10::Error);
  const at::Tensor flags = at::empty({4}, at::kBool);
  EXPECT_THROW(reduce_range(order, op, {flags}, 0, 4, flags), c10::Error);
}

TEST(ReductionOrder, names_go_both_ways) {
  for (const ReductionOrder order : kOrders) {
    EXPECT_EQ(parse_reduction_order(to_string(order)), order);
  }
  try {
    parse_reduction_order("ring");
    FAIL();
  } catch (const c10::Error& e) {
    EXPECT_STREQ(e.what_without_backtrace(),
                 "unknown reduction order 'ring'; it is one of rank_order, gloo_ring, nccl_ring, "
                 "tree");
  }
}

TEST(ReduceOp, has_names) {
  EXPECT_EQ(to_string(ReduceOp::sum()), "sum");
  EXPECT_EQ(to_string(ReduceOp::avg()), "avg");
  EXPECT_EQ(to_string(ReduceOp::premul_sum(0.25)), "premul_sum(0.25)");
  EXPECT_EQ(to_string(ReduceOp::min()), "min");
  EXPECT_EQ(to_string(ReduceOp::max()), "max");
}

}  // namespace
}  // namespace ppfsdp::comm
