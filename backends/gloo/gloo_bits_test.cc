// The claim behind every bit-for-bit comparison with Gloo: reduce_range(kGlooRing) gives the bits
// of ProcessGroupGloo's own all-reduce and reduce-scatter, which this backend does not call.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <memory>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <vector>

#include "src/comm/reduction.h"
#include "src/comm/testing/values.h"

namespace ppfsdp::gloo {
namespace {

using comm::ReduceOp;
using comm::ReductionOrder;
using comm::testing::difference_in_bits;
using comm::testing::make_all_values;

class GlooBits : public ::testing::TestWithParam<int> {
 protected:
  int size() const { return GetParam(); }

  /// Runs `fn(group, rank)` on threads that have a process group of their own.
  template <typename Fn>
  void run(const Fn& fn) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size(); ++rank) {
      threads.emplace_back([&, rank] {
        auto options = c10d::ProcessGroupGloo::Options::create(std::chrono::seconds(60));
        options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
        options->threads = 1;
        c10d::ProcessGroupGloo group(store, rank, size(), options);
        fn(group, rank);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  void check(c10d::ProcessGroupGloo& group, int rank, at::ScalarType dtype, int64_t numel) {
    const auto inputs = make_all_values(dtype, size() * numel, 7, size());
    for (const bool average : {false, true}) {
      const ReduceOp op = average ? ReduceOp::avg() : ReduceOp::sum();
      const auto theirs = average ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
      const auto expected = [&](int64_t begin, int64_t end) {
        at::Tensor output = at::empty({end - begin}, inputs[0].options());
        reduce_range(ReductionOrder::kGlooRing, op, inputs, begin, end, output);
        return output;
      };
      const std::string what = fmt::format("rank {} of {}, {} {} by {}", rank, size(), numel,
                                           c10::toString(dtype), comm::to_string(op));
      std::vector<at::Tensor> reduced = {inputs[rank].clone()};
      c10d::AllreduceOptions reduce_options;
      reduce_options.reduceOp = theirs;
      group.allreduce(reduced, reduce_options)->wait();
      EXPECT_EQ(difference_in_bits(reduced[0], expected(0, size() * numel)), "")
          << "all-reduce, " << what;

      at::Tensor input = inputs[rank].clone();
      at::Tensor output = at::empty({numel}, input.options());
      c10d::ReduceScatterOptions scatter_options;
      scatter_options.reduceOp = theirs;
      group._reduce_scatter_base(output, input, scatter_options)->wait();
      EXPECT_EQ(difference_in_bits(output, expected(rank * numel, (rank + 1) * numel)), "")
          << "reduce-scatter, " << what;
    }
  }
};

TEST_P(GlooBits, OfSmallTensorsAreTheRings) {
  run([&](c10d::ProcessGroupGloo& group, int rank) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
      // Larger worlds are slow on few cores; the two dtypes that gradients have will do for them.
      if (size() > 4 && dtype != at::kFloat && dtype != at::kBFloat16) continue;
      // Sizes that n and 2 n divide and do not, where chunks are short or empty.
      for (const int64_t numel : {1, 3, 7, 8, 13, 257, 4369}) {
        check(group, rank, dtype, numel);
      }
    }
  });
}

TEST_P(GlooBits, OfTensorsOfSeveralSegmentsAreTheRings) {
  // Where a chunk exceeds two segments of 1 MiB: from 2 n MiB on. Larger worlds take too long on
  // few cores; the rule has no special case for them.
  if (size() > 4) GTEST_SKIP() << "worlds of 2 to 4 cover it";
  run([&](c10d::ProcessGroupGloo& group, int rank) {
    check(group, rank, at::kFloat, (1 << 19) + 1);
    check(group, rank, at::kBFloat16, (1 << 20) + 77);
    check(group, rank, at::kFloat, 700001);
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, GlooBits, ::testing::Range(2, 9));

}  // namespace
}  // namespace ppfsdp::gloo
