#include "src/comm/testing/communicator_suite.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>

#include <atomic>
#include <numeric>
#include <vector>

#include "src/comm/reduction.h"
#include "src/comm/testing/suite_util.h"
#include "src/comm/testing/values.h"

namespace ppfsdp::comm::testing {
namespace {

constexpr at::ScalarType kFloats[] = {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble};
constexpr at::ScalarType kIntegers[] = {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong};
constexpr at::ScalarType kOthers[] = {at::kBool, at::kLong, at::kByte, at::kComplexFloat};
// Odd sizes; the last is the one of FSDP2's own tests of odd shapes.
constexpr int64_t kSizes[] = {0, 1, 3, 17 * 257};

std::vector<ReduceOp> all_ops() {
  return {ReduceOp::sum(), ReduceOp::avg(), ReduceOp::premul_sum(0.3), ReduceOp::min(),
          ReduceOp::max()};
}

/// What a reduction over the whole of `inputs` gives for elements [begin, end) in the backend's
/// order.
at::Tensor reduced(const Runtime& runtime, const ReduceOp& op,
                   const std::vector<at::Tensor>& inputs, int64_t begin, int64_t end) {
  at::Tensor output = at::empty({end - begin}, inputs[0].options());
  reduce_range(runtime.reduction_order(), op, inputs, begin, end, output);
  return output;
}

/// How far two ways to fold floating-point values may be apart: the factor rounds each value, and
/// each of the n - 1 additions, and avg's division, its result, by at most the unit roundoff u of
/// magnitudes whose sum is at most sum |x|. A value that is subnormal loses up to its last bit.
at::Tensor spread(const ReduceOp& op, const std::vector<at::Tensor>& inputs, int64_t begin,
                  int64_t end) {
  const auto n = static_cast<double>(inputs.size());
  at::Tensor magnitudes = at::zeros({end - begin}, at::kDouble);
  for (const at::Tensor& input : inputs) {
    magnitudes.add_(input.narrow(0, begin, end - begin).to(at::kDouble).abs());
  }
  if (op.kind == ReduceOp::Kind::kAvg) magnitudes.div_(n);
  if (op.kind == ReduceOp::Kind::kPremulSum) magnitudes.mul_(op.factor);
  const at::ScalarType dtype = inputs[0].scalar_type();
  const double u = dtype == at::kBFloat16 ? 0x1p-8
                   : dtype == at::kHalf   ? 0x1p-11
                   : dtype == at::kFloat  ? 0x1p-24
                                          : 0x1p-53;
  const double smallest = dtype == at::kHalf ? 0x1p-24 : 0x1p-133;
  return magnitudes.mul_(2 * (n + 1) * u).add_(2 * (n + 1) * smallest);
}

/// A reduction over elements [begin, end) of all of `inputs`, in the backend's order.
void expect_reduced(const Runtime& runtime, bool exact, const at::Tensor& got, const ReduceOp& op,
                    const std::vector<at::Tensor>& inputs, int64_t begin, int64_t end,
                    const std::string& what) {
  const at::Tensor expected = reduced(runtime, op, inputs, begin, end);
  const bool rounds = at::isFloatingType(expected.scalar_type()) &&
                      op.kind != ReduceOp::Kind::kMin && op.kind != ReduceOp::Kind::kMax;
  if (exact || !rounds) {
    expect_bits(got, expected, what);
    return;
  }
  ASSERT_EQ(got.scalar_type(), expected.scalar_type()) << what;
  ASSERT_EQ(got.sizes(), expected.sizes()) << what;
  const at::Tensor apart = got.cpu().to(at::kDouble).sub(expected.to(at::kDouble)).abs();
  EXPECT_TRUE(apart.le(spread(op, inputs, begin, end)).all().item<bool>())
      << what << ": " << apart.max().item<double>() << " apart from what rank order gives";
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const SuiteParam& param) {
  return out << param.runner.name << ", " << param.size << " ranks";
}

std::string suite_param_name(const ::testing::TestParamInfo<SuiteParam>& info) {
  return info.param.runner.name + std::to_string(info.param.size);
}

std::vector<SuiteParam> sizes(const WorldRunner& runner, const std::vector<int>& sizes) {
  std::vector<SuiteParam> params;
  for (const int size : sizes) params.push_back({runner, size});
  return params;
}

TEST_P(CommunicatorSuite, RanksKnowWhoTheyAre) {
  std::atomic<uint64_t> seen{0};
  run([&](Runtime& runtime) {
    const Communicator& world = *runtime.world();
    EXPECT_EQ(runtime.world_size(), size());
    EXPECT_EQ(world.size(), size());
    EXPECT_EQ(world.rank(), runtime.rank());
    std::vector<int> everybody(size());
    std::iota(everybody.begin(), everybody.end(), 0);
    EXPECT_EQ(world.ranks(), everybody);
    seen |= uint64_t{1} << runtime.rank();
  });
  EXPECT_EQ(seen, (uint64_t{1} << size()) - 1) << "a rank did not run, or two had one number";
}

TEST_P(CommunicatorSuite, AllGatherPutsEveryInputInItsSlot) {
  run([&](Runtime& runtime) {
    const auto stream = runtime.create_stream("gather", StreamPriority::kHigh);
    const auto check = [&](at::ScalarType dtype, int64_t numel, bool in_place) {
      const auto inputs = make_all_values(dtype, numel, 1, size());
      const at::Tensor output = empty_here(runtime, size() * numel, dtype);
      at::Tensor input = here(runtime, inputs[runtime.rank()]);
      if (in_place) {
        const at::Tensor slot = output.narrow(0, runtime.rank() * numel, numel);
        slot.copy_(input);
        input = slot;
      }
      begin(runtime, *stream);
      runtime.world()->all_gather_into(output, input, *stream);
      finish(runtime, *stream);
      expect_bits(
          output, at::cat(inputs),
          fmt::format("all-gather of {} {}, in place {}", numel, c10::toString(dtype), in_place));
    };
    for (const bool in_place : {false, true}) {
      for (const at::ScalarType dtype : kFloats) {
        for (const int64_t numel : kSizes) check(dtype, numel, in_place);
      }
      for (const at::ScalarType dtype : kOthers) check(dtype, 5, in_place);
    }
  });
}

// Ranks of one process may share the output; none may tell.
TEST_P(CommunicatorSuite, AllGatherMakesAnOutputOfTheRanksOwn) {
  run([&](Runtime& runtime) {
    const auto stream = runtime.create_stream("gather", StreamPriority::kHigh);
    const auto check = [&](at::ScalarType dtype, int64_t numel) {
      const auto inputs = make_all_values(dtype, numel, 1, size());
      const at::Tensor input = here(runtime, inputs[runtime.rank()]);
      begin(runtime, *stream);
      const at::Tensor output = runtime.world()->all_gather(input, *stream);
      finish(runtime, *stream);
      const std::string what = fmt::format("all-gather of {} {}", numel, c10::toString(dtype));
      expect_bits(output, at::cat(inputs), what);
      output.fill_(runtime.rank());
      runtime.world()->barrier();
      expect_bits(output, at::full({size() * numel}, runtime.rank(), dtype),
                  what + ", overwritten");
    };
    for (const at::ScalarType dtype : kFloats) {
      for (const int64_t numel : kSizes) check(dtype, numel);
    }
    for (const at::ScalarType dtype : kOthers) check(dtype, 5);
  });
}

TEST_P(CommunicatorSuite, ReduceScatterFoldsInTheOrderItNames) {
  run([&](Runtime& runtime) {
    const auto stream = runtime.create_stream("scatter", StreamPriority::kHigh);
    const auto check = [&](at::ScalarType dtype, int64_t numel, const ReduceOp& op, bool in_place) {
      const auto inputs = make_all_values(dtype, size() * numel, 2, size());
      const int64_t from = runtime.rank() * numel;
      const at::Tensor input = here(runtime, inputs[runtime.rank()]);
      const at::Tensor output =
          in_place ? input.narrow(0, from, numel) : empty_here(runtime, numel, dtype);
      begin(runtime, *stream);
      runtime.world()->reduce_scatter(output, input, op, *stream);
      finish(runtime, *stream);
      expect_reduced(runtime, exact(), output, op, inputs, from, from + numel,
                     fmt::format("reduce-scatter to {} {} by {}, in place {}", numel,
                                 c10::toString(dtype), to_string(op), in_place));
    };
    for (const ReduceOp& op : all_ops()) {
      for (const at::ScalarType dtype : kFloats) {
        for (const int64_t numel : kSizes) check(dtype, numel, op, numel == 3);
      }
    }
    for (const at::ScalarType dtype : kIntegers) check(dtype, 7, ReduceOp::sum(), false);
  });
}

TEST_P(CommunicatorSuite, AllReduceFoldsInTheOrderItNames) {
  run([&](Runtime& runtime) {
    const auto stream = runtime.create_stream("reduce", StreamPriority::kNormal);
    const auto check = [&](at::ScalarType dtype, int64_t numel, const ReduceOp& op) {
      const auto inputs = make_all_values(dtype, numel, 3, size());
      const at::Tensor tensor = here(runtime, inputs[runtime.rank()]);
      begin(runtime, *stream);
      runtime.world()->all_reduce(tensor, op, *stream);
      finish(runtime, *stream);
      expect_reduced(
          runtime, exact(), tensor, op, inputs, 0, numel,
          fmt::format("all-reduce of {} {} by {}", numel, c10::toString(dtype), to_string(op)));
    };
    for (const ReduceOp& op : all_ops()) {
      for (const at::ScalarType dtype : kFloats) {
        for (const int64_t numel : kSizes) check(dtype, numel, op);
      }
    }
    for (const at::ScalarType dtype : kIntegers) {
      for (const ReduceOp& op : {ReduceOp::sum(), ReduceOp::min(), ReduceOp::max()}) {
        check(dtype, 7, op);
      }
    }
    // Larger than what a backend may treat as small.
    check(at::kFloat, 30011, ReduceOp::avg());
  });
}

TEST_P(CommunicatorSuite, ReductionsOfSeveralChunksFoldInTheOrderTheyName) {
  // More than 1 MiB a rank, from where Gloo's ring cuts a rank's share into several segments; slow
  // where ranks share few cores, so for small worlds only.
  if (size() > 3) GTEST_SKIP() << "covered by worlds of 2 and 3";
  run([&](Runtime& runtime) {
    const auto stream = runtime.create_stream("scatter", StreamPriority::kHigh);
    const int64_t numel = 700001;
    const auto inputs = make_all_values(at::kFloat, size() * numel, 4, size());
    const at::Tensor tensor = here(runtime, inputs[runtime.rank()]);
    const at::Tensor input = tensor.clone();
    const at::Tensor output = empty_here(runtime, numel, at::kFloat);
    begin(runtime, *stream);
    runtime.world()->reduce_scatter(output, input, ReduceOp::avg(), *stream);
    runtime.world()->all_reduce(tensor, ReduceOp::sum(), *stream);
    finish(runtime, *stream);
    const int64_t from = runtime.rank() * numel;
    expect_reduced(runtime, exact(), output, ReduceOp::avg(), inputs, from, from + numel,
                   "scatter");
    expect_reduced(runtime, exact(), tensor, ReduceOp::sum(), inputs, 0, size() * numel, "reduce");
  });
}

TEST_P(CommunicatorSuite, BroadcastGivesAllTheRootsValues) {
  run([&](Runtime& runtime) {
    const auto stream = runtime.create_stream("broadcast", StreamPriority::kNormal);
    const auto check = [&](at::ScalarType dtype, int64_t numel, int root) {
      const auto inputs = make_all_values(dtype, numel, 5, size());
      const at::Tensor tensor = here(runtime, inputs[runtime.rank()]);
      begin(runtime, *stream);
      runtime.world()->broadcast(tensor, root, *stream);
      finish(runtime, *stream);
      expect_bits(tensor, inputs[root], fmt::format("broadcast from rank {}", root));
    };
    for (int root = 0; root < size(); ++root) check(at::kFloat, 33, root);
    for (const at::ScalarType dtype : kOthers) check(dtype, 9, size() - 1);
    for (const int64_t numel : kSizes) check(at::kBFloat16, numel, size() / 2);
  });
}

TEST_P(CommunicatorSuite, AllToAllDeliversEveryPart) {
  run([&](Runtime& runtime) {
    const auto stream = runtime.create_stream("exchange", StreamPriority::kNormal);
    const int n = size();
    const int rank = runtime.rank();
    // Uneven: from rank a to rank b go (a + 2 b) % 4 elements, none among them.
    const auto uneven = [](int from, int to) -> int64_t { return (from + 2 * to) % 4; };
    const auto even = [](int, int) -> int64_t { return 3; };
    const auto check = [&](const std::function<int64_t(int, int)>& count, bool pass_splits) {
      // Every element says where it comes from, where it goes and which of them it is.
      const auto part = [&](int from, int to) {
        at::Tensor values = at::empty({count(from, to)}, at::kInt);
        for (int64_t i = 0; i < values.numel(); ++i) {
          values[i] = from * 10000 + to * 100 + i;
        }
        return values;
      };
      std::vector<int64_t> sends, receives;
      std::vector<at::Tensor> parts, expected;
      for (int peer = 0; peer < n; ++peer) {
        sends.push_back(count(rank, peer));
        receives.push_back(count(peer, rank));
        parts.push_back(part(rank, peer));
        expected.push_back(part(peer, rank));
      }
      const at::Tensor wanted = at::cat(expected);
      const at::Tensor output = empty_here(runtime, wanted.numel(), at::kInt);
      const at::Tensor input = here(runtime, at::cat(parts));
      if (!pass_splits) sends = receives = {};
      begin(runtime, *stream);
      runtime.world()->all_to_all(output, input, receives, sends, *stream);
      finish(runtime, *stream);
      expect_bits(output, wanted, "all_to_all");
    };
    check(even, false);
    check(even, true);
    check(uneven, true);
  });
}

TEST_P(CommunicatorSuite, MessagesArriveInOrder) {
  if (size() == 1) GTEST_SKIP() << "a rank does not send to itself";
  run([&](Runtime& runtime) {
    const int next = (runtime.rank() + 1) % size();
    const int previous = (runtime.rank() + size() - 1) % size();
    const auto out = runtime.create_stream("out", StreamPriority::kNormal);
    const auto in = runtime.create_stream("in", StreamPriority::kNormal);
    // Two of one size and dtype, so that only their order tells them apart, then one of another.
    const auto sent_by = [](int rank) {
      return std::vector<at::Tensor>{at::full({5}, 1.0 * rank), at::full({5}, 100.0 + rank),
                                     at::full({2}, 200 + rank, at::kLong)};
    };
    std::vector<at::Tensor> received, sent;
    for (const at::Tensor& tensor : sent_by(runtime.rank())) {
      sent.push_back(here(runtime, tensor));
      received.push_back(at::zeros_like(sent.back()));
    }
    begin(runtime, *in);
    begin(runtime, *out);
    for (const at::Tensor& tensor : sent) runtime.world()->send(tensor, next, *out);
    for (const at::Tensor& tensor : received) runtime.world()->recv(tensor, previous, *in);
    finish(runtime, *in);
    const auto expected = sent_by(previous);
    for (size_t i = 0; i < received.size(); ++i) {
      expect_bits(received[i], expected[i], fmt::format("message {}", i));
    }
    out->synchronize();
  });
}

TEST_P(CommunicatorSuite, NobodyLeavesABarrierBeforeAllAreThere) {
  std::atomic<int> here{0};
  run([&](Runtime& runtime) {
    for (int round = 1; round <= 3; ++round) {
      ++here;
      runtime.world()->barrier();
      EXPECT_GE(here, round * size());
      runtime.world()->barrier();
    }
  });
}

TEST_P(CommunicatorSuite, SubgroupsAreWorldsOfTheirOwn) {
  run([&](Runtime& runtime) {
    const int n = size();
    const int rank = runtime.rank();
    const auto stream = runtime.create_stream("group", StreamPriority::kNormal);
    const auto check = [&](Communicator& group, const std::vector<int>& world_ranks) {
      EXPECT_EQ(group.ranks(), world_ranks);
      EXPECT_EQ(world_ranks[group.rank()], rank);
      const int64_t numel = 11;
      const int m = group.size();
      std::vector<at::Tensor> inputs;
      for (const int member : world_ranks) {
        inputs.push_back(make_values(at::kFloat, m * numel, 6, member));
      }
      const at::Tensor input = here(runtime, inputs[group.rank()]);
      const at::Tensor sum = here(runtime, inputs[group.rank()]);
      const at::Tensor output = empty_here(runtime, numel, at::kFloat);
      const at::Tensor gathered = empty_here(runtime, m * numel, at::kFloat);
      begin(runtime, *stream);
      group.reduce_scatter(output, input, ReduceOp::avg(), *stream);
      group.all_reduce(sum, ReduceOp::sum(), *stream);
      group.all_gather_into(gathered, output, *stream);
      finish(runtime, *stream);
      group.barrier();
      // avg divides by the size of the group, not of the world.
      expect_reduced(runtime, exact(), gathered, ReduceOp::avg(), inputs, 0, m * numel,
                     fmt::format("{} of {} ranks", group.name(), m));
      expect_reduced(runtime, exact(), sum, ReduceOp::sum(), inputs, 0, m * numel, group.name());
    };

    // Two interleaved halves at once.
    std::vector<int> mine;
    for (int r = rank % 2; r < n; r += 2) mine.push_back(r);
    const CommunicatorPtr half = runtime.world()->subgroup(mine, "half");
    check(*half, mine);
    // A group of a group: its members count in the half.
    std::vector<int> front;
    const int middle = (half->size() + 1) / 2;
    const bool in_front = half->rank() < middle;
    for (int r = in_front ? 0 : middle; r < (in_front ? middle : half->size()); ++r) {
      front.push_back(r);
    }
    std::vector<int> front_in_world;
    for (const int r : front) front_in_world.push_back(mine[r]);
    const CommunicatorPtr quarter = half->subgroup(front, "quarter");
    check(*quarter, front_in_world);
    // Alone.
    check(*runtime.world()->subgroup({rank}, "self"), {rank});
    // The world is still in step, and so is the first group, behind the later ones.
    std::vector<int> everybody(n);
    std::iota(everybody.begin(), everybody.end(), 0);
    check(*runtime.world(), everybody);
    check(*half, mine);
  });
}

// Operations alike in all but their group: mixed up, the sums would be of the wrong values.
TEST_P(CommunicatorSuite, GroupsOfTheSameRanksDoNotPairUp) {
  run([&](Runtime& runtime) {
    const int n = size();
    std::vector<int> everybody(n);
    std::iota(everybody.begin(), everybody.end(), 0);
    const CommunicatorPtr first = runtime.world()->subgroup(everybody, "same");
    const CommunicatorPtr second = runtime.world()->subgroup(everybody, "same");
    const auto a = runtime.create_stream("a", StreamPriority::kNormal);
    const auto b = runtime.create_stream("b", StreamPriority::kNormal);
    const at::Tensor x = here(runtime, at::full({3}, 1.0));
    const at::Tensor y = here(runtime, at::full({3}, 100.0));
    begin(runtime, *a);
    begin(runtime, *b);
    const bool other_order = runtime.rank() % 2 == 1;
    if (other_order) second->all_reduce(y, ReduceOp::sum(), *b);
    first->all_reduce(x, ReduceOp::sum(), *a);
    if (!other_order) second->all_reduce(y, ReduceOp::sum(), *b);
    finish(runtime, *a);
    finish(runtime, *b);
    EXPECT_EQ(x[0].item<float>(), 1.0f * n);
    EXPECT_EQ(y[0].item<float>(), 100.0f * n);
  });
}

// Rank 1 goes through the dims of a mesh in another order than the others. It holds nobody up for
// ever, and every sum is over the group that was named.
TEST_P(CommunicatorSuite, OperationsOfDifferentGroupsNeedNoCommonOrder) {
  if (size() % 2 != 0) return;
  run([&](Runtime& runtime) {
    const int n = size(), rank = runtime.rank(), width = n / 2;
    std::vector<int> row(width);
    std::iota(row.begin(), row.end(), rank / width * width);
    const std::vector<int> column = {rank % width, rank % width + width};
    const CommunicatorPtr groups[] = {runtime.world()->subgroup(column, "column"),
                                      runtime.world()->subgroup(row, "row")};
    for (const int i : {0, 1}) {
      const CommunicatorPtr& group = groups[rank == 1 ? 1 - i : i];
      const at::Tensor value = here(runtime, at::full({2}, 1.0 + rank));
      group->all_reduce(value, ReduceOp::sum(), runtime.compute_stream());
      runtime.compute_stream().synchronize();
      int expected = group->size();
      for (const int member : group->ranks()) expected += member;
      EXPECT_EQ(value[1].item<float>(), static_cast<float>(expected)) << group->name();
    }
  });
}

TEST_P(CommunicatorSuite, ARefusedCallLeavesTheGroupUsable) {
  run([&](Runtime& runtime) {
    const auto stream = runtime.create_stream("work", StreamPriority::kNormal);
    const at::Tensor tensor = here(runtime, at::full({3}, 1.0));
    const at::Tensor too_large = here(runtime, at::zeros({3 * size() + 1}));
    const uint64_t before = runtime.world()->sequence();
    EXPECT_THROW(runtime.world()->broadcast(tensor, size(), *stream), c10::Error);
    EXPECT_THROW(runtime.world()->all_gather_into(too_large, tensor, *stream), c10::Error);
    EXPECT_EQ(runtime.world()->sequence(), before);
    begin(runtime, *stream);
    runtime.world()->all_reduce(tensor, ReduceOp::sum(), *stream);
    finish(runtime, *stream);
    EXPECT_EQ(tensor[2].item<float>(), static_cast<float>(size()));
    EXPECT_EQ(runtime.world()->sequence(), before + 1);
  });
}

}  // namespace ppfsdp::comm::testing
