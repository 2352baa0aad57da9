// Collectives of the simulated mesh give what they promise, bit for bit in the chosen order, under
// every schedule; groups and transfers match by order of issue.
#include "sim/mesh/sim_communicator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "sim/mesh/world.h"
#include "src/comm/communicator.h"
#include "src/comm/eager_stream.h"
#include "src/comm/reduction.h"

namespace ppfsdp::sim {
namespace {

using comm::ReduceOp;
using comm::ReductionOrder;
using comm::Runtime;
using comm::StreamPriority;

constexpr ReductionOrder kOrders[] = {ReductionOrder::kRankOrder, ReductionOrder::kGlooRing,
                                      ReductionOrder::kNcclRing, ReductionOrder::kTree};

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.numel() == b.numel() && a.scalar_type() == b.scalar_type() &&
         (a.numel() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0);
}

std::vector<at::Tensor> inputs_of(int n, int64_t numel, at::ScalarType dtype) {
  auto generator = at::detail::createCPUGenerator(17);
  std::vector<at::Tensor> inputs;
  for (int rank = 0; rank < n; ++rank) {
    const at::Tensor scale = at::randn({numel}, generator).mul(3).exp();
    inputs.push_back(at::randn({numel}, generator).mul(scale).to(dtype));
  }
  return inputs;
}

TEST(SimCommunicator, reduces_in_the_chosen_order) {
  for (const int n : {1, 2, 3, 5, 7, 8}) {
    for (const ReductionOrder order : kOrders) {
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
        for (const int64_t count : {0, 1, 7, 301}) {
          const auto inputs = inputs_of(n, n * count, dtype);
          const ReduceOp op = n % 2 == 0 ? ReduceOp::avg() : ReduceOp::premul_sum(0.3);
          const at::Tensor expected = at::empty({n * count}, dtype);
          comm::reduce_range(order, op, inputs, 0, n * count, expected);
          run_world(n, {.seed = 9, .schedule = Schedule::kRandom, .order = order},
                    [&](Runtime& runtime) {
                      EXPECT_EQ(runtime.reduction_order(), order);
                      const auto stream = runtime.create_stream("reduce", StreamPriority::kHigh);
                      const int rank = runtime.rank();
                      const at::Tensor slice = at::empty({count}, dtype);
                      const at::Tensor whole = inputs[rank].clone();
                      const at::Tensor in_place = inputs[rank].clone();
                      runtime.world()->reduce_scatter(slice, inputs[rank].clone(), op, *stream);
                      runtime.world()->all_reduce(whole, op, *stream);
                      runtime.world()->reduce_scatter(in_place.narrow(0, rank * count, count),
                                                      in_place, op, *stream);
                      stream->synchronize();
                      const at::Tensor mine = expected.narrow(0, rank * count, count);
                      EXPECT_TRUE(same_bits(slice, mine));
                      EXPECT_TRUE(same_bits(whole, expected));
                      EXPECT_TRUE(same_bits(in_place.narrow(0, rank * count, count), mine));
                    });
        }
      }
    }
  }
}

TEST(SimCommunicator, moves_any_dtype) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kLong, at::kBool, at::kByte}) {
    for (const int n : {1, 3, 4}) {
      run_world(n, {.seed = 4, .schedule = Schedule::kRandom}, [&](Runtime& runtime) {
        const auto stream = runtime.create_stream("side", StreamPriority::kHigh);
        comm::Communicator& world = *runtime.world();
        const int rank = runtime.rank();
        const auto values = [&](int from, int64_t count) {
          return at::arange(from * 10, from * 10 + count).remainder(2 + from).to(dtype);
        };
        const at::Tensor gathered = at::zeros({n * 3}, dtype), root = values(rank, 3);
        world.all_gather_into(gathered, values(rank, 3), *stream);
        world.broadcast(root, n - 1, *stream);
        stream->synchronize();
        for (int from = 0; from < n; ++from) {
          EXPECT_TRUE(gathered.narrow(0, from * 3, 3).equal(values(from, 3)));
        }
        EXPECT_TRUE(root.equal(values(n - 1, 3)));
      });
    }
  }
}

TEST(SimCommunicator, all_to_all_follows_uneven_splits) {
  const int n = 4;
  // Rank r sends (r + q) % 3 elements of value 100 r + q to rank q.
  const auto count = [](int from, int to) -> int64_t { return (from + to) % 3; };
  run_world(n, {.seed = 4, .schedule = Schedule::kRandom}, [&](Runtime& runtime) {
    const int rank = runtime.rank();
    std::vector<int64_t> sends, receives;
    std::vector<at::Tensor> pieces, expected;
    for (int q = 0; q < n; ++q) {
      sends.push_back(count(rank, q));
      receives.push_back(count(q, rank));
      pieces.push_back(at::full({count(rank, q)}, 100.0 * rank + q));
      expected.push_back(at::full({count(q, rank)}, 100.0 * q + rank));
    }
    const at::Tensor input = at::cat(pieces);
    const at::Tensor output = at::zeros({at::cat(expected).numel()});
    runtime.world()->all_to_all(output, input, receives, sends, runtime.compute_stream());
    EXPECT_TRUE(output.equal(at::cat(expected)));
  });
}

TEST(SimCommunicator, transfers_match_in_order_for_each_pair) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    run_world(3, {.seed = seed, .schedule = Schedule::kRandom}, [](Runtime& runtime) {
      const auto in = runtime.create_stream("in", StreamPriority::kNormal);
      const auto out = runtime.create_stream("out", StreamPriority::kNormal);
      const int rank = runtime.rank();
      const int next = (rank + 1) % 3, previous = (rank + 2) % 3;
      std::vector<at::Tensor> received;
      for (int i = 0; i < 4; ++i) {
        received.push_back(at::zeros({2}));
        runtime.world()->send(at::full({2}, 10.0 * rank + i), next, *out);
        runtime.world()->recv(received.back(), previous, *in);
      }
      // Two ranks that send to each other at once must not wait for one another.
      const at::Tensor back = at::zeros({1});
      if (rank < 2) {
        runtime.world()->send(at::full({1}, 7.0 + rank), 1 - rank, *out);
        runtime.world()->recv(back, 1 - rank, *in);
      }
      in->synchronize();
      out->synchronize();
      for (int i = 0; i < 4; ++i) {
        EXPECT_EQ(received[i][1].item<float>(), 10.0f * previous + i);
      }
      if (rank < 2) {
        EXPECT_EQ(back.item<float>(), 8.0f - rank);
      }
    });
  }
}

TEST(SimCommunicator, subgroups_share_nothing_but_their_members) {
  for (const Schedule schedule : {Schedule::kRoundRobin, Schedule::kRandom, Schedule::kLazy}) {
    run_world(6, {.seed = 2, .schedule = schedule}, [](Runtime& runtime) {
      // A 2 x 3 mesh: rows and columns, then a group of a group.
      const int rank = runtime.rank(), row = rank / 3, column = rank % 3;
      const auto rows = runtime.world()->subgroup({3 * row, 3 * row + 1, 3 * row + 2}, "row");
      const auto columns = runtime.world()->subgroup({column, column + 3}, "column");
      EXPECT_EQ(rows->rank(), column);
      EXPECT_EQ(columns->rank(), row);
      EXPECT_EQ(columns->ranks(), (std::vector<int>{column, column + 3}));
      EXPECT_EQ(rows->name(), "row");
      EXPECT_EQ(runtime.world()->sequence(), 2u);
      EXPECT_EQ(rows->sequence(), 0u);
      const auto sum_over = [&](comm::Communicator& group) {
        const at::Tensor value = at::full({1}, static_cast<double>(rank));
        group.all_reduce(value, ReduceOp::sum(), runtime.compute_stream());
        return value.item<float>();
      };
      EXPECT_EQ(sum_over(*rows), 9.0f * row + 3);
      EXPECT_EQ(sum_over(*columns), 2.0f * column + 3);
      // The first two of a row leave the third alone: members are ranks of the row.
      const auto pair = rows->subgroup(column < 2 ? std::vector<int>{0, 1} : std::vector<int>{2},
                                       column < 2 ? "pair" : "alone");
      EXPECT_EQ(pair->size(), column < 2 ? 2 : 1);
      EXPECT_EQ(pair->ranks().front(), column < 2 ? 3 * row : rank);
      EXPECT_EQ(sum_over(*pair), column < 2 ? 6.0f * row + 1 : static_cast<float>(rank));
    });
  }
}

// Copies of their own would cost a world of n ranks n times the memory and the time.
TEST(SimCommunicator, ranks_share_what_they_gather) {
  const void* data = nullptr;
  run_world(3, {}, [&](Runtime& runtime) {
    const auto stream = runtime.create_stream("gather", StreamPriority::kHigh);
    const at::Tensor output =
        runtime.world()->all_gather(at::full({2}, runtime.rank(), at::kFloat), *stream);
    stream->synchronize();
    if (runtime.rank() == 0) data = output.const_data_ptr();
    runtime.world()->barrier();
    EXPECT_EQ(output.const_data_ptr(), data);
    runtime.world()->barrier();
  });
}

// Who reads the output without a wait must not find old or early values there.
TEST(SimCommunicator, what_is_not_yet_gathered_is_nan) {
  run_world(2, {.schedule = Schedule::kLazy}, [](Runtime& runtime) {
    const auto stream = runtime.create_stream("gather", StreamPriority::kHigh);
    for (const int64_t numel : {2, 5, 3}) {
      const at::Tensor output = runtime.world()->all_gather(at::ones({numel}), *stream);
      EXPECT_EQ(output.numel(), 2 * numel);
      EXPECT_TRUE(output.isnan().all().item<bool>());
      stream->synchronize();
      EXPECT_TRUE(output.eq(1).all().item<bool>());
    }
  });
}

TEST(SimCommunicator, matches_by_order_of_issue_over_streams) {
  // Two collectives on two streams, which ranks drain in different orders.
  for (uint64_t seed = 0; seed < 20; ++seed) {
    run_world(2, {.seed = seed, .schedule = Schedule::kRandom}, [](Runtime& runtime) {
      const auto a = runtime.create_stream("a", StreamPriority::kNormal);
      const auto b = runtime.create_stream("b", StreamPriority::kNormal);
      const at::Tensor x = at::full({1}, 1.0), y = at::full({1}, 10.0);
      runtime.world()->all_reduce(x, ReduceOp::sum(), *a);
      runtime.world()->all_reduce(y, ReduceOp::sum(), *b);
      // A rank that waits for a while its peer waits for b is no deadlock.
      (runtime.rank() == 0 ? a : b)->synchronize();
      (runtime.rank() == 0 ? b : a)->synchronize();
      EXPECT_EQ(x.item<float>(), 2.0f);
      EXPECT_EQ(y.item<float>(), 20.0f);
    });
  }
}

std::string error_of(int n, const std::function<void(Runtime&)>& fn) {
  try {
    run_world(n, {}, fn);
  } catch (const comm::CommError& error) {
    return error.what();
  }
  return "(no CommError)";
}

TEST(SimCommunicator, ranks_in_different_groups_are_told_who_is_where) {
  // On a 2 x 2 mesh rank 0 alone reduces over the first dim.
  EXPECT_EQ(error_of(4,
                     [](Runtime& runtime) {
                       const int rank = runtime.rank(), row = rank / 2, column = rank % 2;
                       const auto dp = runtime.world()->subgroup({column, column + 2}, "dp");
                       const auto tp = runtime.world()->subgroup({2 * row, 2 * row + 1}, "tp");
                       (rank == 0 ? dp : tp)
                           ->all_reduce(at::zeros({3}), ReduceOp::sum(), runtime.compute_stream());
                     }),
            "deadlock: no rank can go on. rank 0: waiting for all_reduce #0 on group 'dp' "
            "(returned without it: rank 1 (rank 2 of the world)); rank 1: waiting for all_reduce "
            "#0 on group 'tp' (not issued by rank 0); ranks 2, 3: returned");
  // Two groups of the same ranks, in another order on rank 1.
  EXPECT_EQ(
      error_of(
          2,
          [](Runtime& runtime) {
            const auto a = runtime.world()->subgroup({0, 1}, "a");
            const auto b = runtime.world()->subgroup({0, 1}, "b");
            for (const auto& group : {runtime.rank() == 0 ? a : b, runtime.rank() == 0 ? b : a}) {
              group->all_reduce(at::zeros({3}), ReduceOp::sum(), runtime.compute_stream());
            }
          }),
      "deadlock: no rank can go on. rank 0: waiting for all_reduce #0 on group 'a' (not "
      "issued by rank 1); rank 1: waiting for all_reduce #0 on group 'b' (not issued by rank "
      "0)");
}

TEST(SimCommunicator, groups_made_in_different_orders_are_refused) {
  EXPECT_EQ(error_of(4,
                     [](Runtime& runtime) {
                       const int rank = runtime.rank(), row = rank / 2, column = rank % 2;
                       const std::vector<int> dp = {column, column + 2};
                       const std::vector<int> tp = {2 * row, 2 * row + 1};
                       runtime.world()->subgroup(rank == 1 ? tp : dp, rank == 1 ? "tp" : "dp");
                     }),
            "rank 1: subgroup #0 on group 'world': rank 1 called subgroup([0, 1], 'tp'), but rank "
            "0 called subgroup([0, 2], 'dp')");
}

TEST(SimCommunicator, keeps_its_tensors_alive) {
  run_world(2, {.schedule = Schedule::kLazy}, [](Runtime& runtime) {
    const auto stream = runtime.create_stream("side", StreamPriority::kNormal);
    const at::Tensor output = at::zeros({2048});
    {
      const at::Tensor input = at::full({1024}, 3.0);
      runtime.world()->all_gather_into(output, input, *stream);
    }
    const at::Tensor other = at::full({1024}, 9.0);
    stream->synchronize();
    EXPECT_EQ(output.eq(3.0).sum().item<int64_t>(), 2048);
  });
}

TEST(SimCommunicator, wants_its_own_ranks_streams) {
  const auto refused = [](const std::function<void(Runtime&)>& fn) {
    try {
      run_world(2, {}, fn);
    } catch (const c10::Error& e) {
      return std::string(e.what_without_backtrace());
    }
    return std::string("(accepted)");
  };
  comm::EagerStream foreign("foreign");
  EXPECT_EQ(refused([&](Runtime& runtime) {
              runtime.world()->all_reduce(at::zeros({1}), ReduceOp::sum(), foreign);
            }),
            "rank 0: all_reduce on group 'world' (rank 0 of 2): stream 'foreign' was not made by "
            "this rank's runtime");
  std::shared_ptr<comm::Stream> of_rank_0;
  EXPECT_EQ(refused([&](Runtime& runtime) {
              if (runtime.rank() == 0) {
                of_rank_0 = runtime.create_stream("mine", StreamPriority::kNormal);
              }
              runtime.world()->barrier();
              if (runtime.rank() == 1) {
                runtime.world()->all_reduce(at::zeros({1}), ReduceOp::sum(), *of_rank_0);
              }
              runtime.world()->barrier();
            }),
            "rank 1: all_reduce on group 'world' (rank 1 of 2): stream 'mine' was not made by this "
            "rank's runtime");
}

}  // namespace
}  // namespace ppfsdp::sim
