#include "src/dtensor/redistribute_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "src/comm/communicator.h"
#include "src/dtensor/dtensor.h"
#include "src/dtensor/sharding.h"
#include "src/dtensor/testing.h"

namespace ppfsdp::dtensor {
namespace {

using testing::kP;
using testing::kR;
using testing::S;
using Sizes = std::vector<int64_t>;

Placement SS(int64_t dim, int64_t factor) { return Placement::strided_shard(dim, factor); }

/// Every way, step by step, up to a number of steps, without regard to what it costs.
class BruteForce {
 public:
  BruteForce(const Sizes& mesh, const Sizes& sizes, const Placements& from, const Placements& to)
      : mesh_(mesh), sizes_(sizes), to_(to) {
    for (size_t dim = 0; dim < sizes.size(); ++dim) {
      orders_.push_back(shard_order(mesh, from, static_cast<int64_t>(dim)));
      wanted_.push_back(shard_order(mesh, to, static_cast<int64_t>(dim)));
    }
    for (const Placement& placement : from) {
      partial_.push_back(placement.is_partial());
    }
    walk(static_cast<int>(2 * mesh.size()) + 1, 0);
  }

  /// The least of bytes and kBytesOfACollective a collective, of elements of 4 bytes.
  int64_t least() const { return least_; }

 private:
  int64_t part(const std::vector<Sizes>& orders) const {
    int64_t numel = 1;
    for (size_t dim = 0; dim < sizes_.size(); ++dim) {
      int64_t size = sizes_[dim];
      for (int64_t i : orders[dim]) {
        size = shard_range(size, mesh_[i], 0).length;
      }
      numel *= size;
    }
    return numel;
  }

  bool done() const {
    for (size_t i = 0; i < mesh_.size(); ++i) {
      if (partial_[i] != to_[i].is_partial()) {
        return false;
      }
    }
    return orders_ == wanted_;
  }

  void walk(int steps, int64_t cost) {
    if (cost >= least_) {
      return;
    }
    if (done()) {
      least_ = cost;
      return;
    }
    if (steps == 0) {
      return;
    }
    for (size_t i = 0; i < mesh_.size(); ++i) {
      const auto id = static_cast<int64_t>(i);
      Sizes* split = nullptr;
      for (Sizes& order : orders_) {
        split = std::count(order.begin(), order.end(), id) > 0 ? &order : split;
      }
      if (split != nullptr && split->back() != id) {
        continue;
      }
      const int64_t n = mesh_[i];
      const int64_t before = part(orders_);
      const auto next = [&](int64_t elements, bool communicates) {
        walk(steps - 1, cost + 4 * elements + (communicates ? kBytesOfACollective : 0));
      };
      const bool partial = partial_[i];
      if (split != nullptr) {
        split->pop_back();
        next((n - 1) * before, true);  // all-gather
        if (to_[i].is_partial()) {
          partial_[i] = true;
          next(0, false);
          partial_[i] = false;
        }
      } else {
        partial_[i] = !partial;
        // all-reduce, or a place among zeros
        next(partial ? 2 * (n - 1) * ((before + n - 1) / n) : 0, partial);
        partial_[i] = false;
      }
      for (Sizes& order : orders_) {
        if (&order == split) {
          continue;
        }
        order.push_back(id);
        if (split != nullptr) {
          split->push_back(id);
        }
        const int64_t piece = part(orders_);  // split both ways: what goes to each of the others
        if (split != nullptr) {
          split->pop_back();
        }
        const bool communicates = split != nullptr || partial;
        next(communicates ? (n - 1) * piece : 0, communicates);
        order.pop_back();
      }
      partial_[i] = partial;
      if (split != nullptr) {
        split->push_back(id);
      }
    }
  }

  Sizes mesh_, sizes_;
  Placements to_;
  std::vector<Sizes> orders_, wanted_;
  std::vector<bool> partial_;
  int64_t least_ = std::numeric_limits<int64_t>::max();
};

// A plan of more bytes than need be is time lost on every step of a training.
TEST(PlanRedistribution, no_other_way_sends_fewer_bytes) {
  std::vector<Placements> all;
  for (const Placement& a : {kR, kP, S(0), S(1)}) {
    for (const Placement& b : {kR, kP, S(0), S(1)}) {
      all.push_back({a, b});
    }
  }
  all.push_back({SS(0, 3), S(0)});
  all.push_back({SS(1, 3), S(1)});
  // A collective's own share decides for the small one, the bytes for the large one.
  for (const Sizes& sizes : {Sizes{7, 5}, Sizes{600, 900}}) {
    for (const Placements& from : all) {
      for (const Placements& to : all) {
        const RedistributionPlan plan = plan_redistribution({2, 3}, sizes, 4, from, to);
        EXPECT_EQ(plan.bytes + kBytesOfACollective * plan.collectives,
                  BruteForce({2, 3}, sizes, from, to).least())
            << to_string(from) << " -> " << to_string(to);
      }
    }
  }
}

// Gathering both splits, as one would without looking, sends 3/4 of the tensor: 49152 elements.
TEST(PlanRedistribution, keeps_an_inner_split_on_another_dim_while_it_gathers_the_outer) {
  const RedistributionPlan plan =
      plan_redistribution({2, 2}, {256, 256}, 4, {S(0), S(0)}, {kR, S(0)});
  EXPECT_EQ(plan.bytes, 4 * (8192 + 16384 + 16384));
  ASSERT_EQ(plan.transitions.size(), 3);
  EXPECT_EQ(plan.transitions[0].mesh_dim, 1);
  EXPECT_EQ(plan.transitions[0].to, S(1));
  EXPECT_EQ(plan.transitions[1].to, kR);
  EXPECT_EQ(plan.transitions[2].to, S(0));
  // Two scalars' worth of gradient norms: two all-reduces, where a large tensor is
  // reduce-scattered.
  EXPECT_EQ(plan_redistribution({2, 2}, {100}, 4, {kP, kP}, {kR, kR}).collectives, 2);
  EXPECT_EQ(plan_redistribution({2, 2}, {1 << 20}, 4, {kP, kP}, {kR, kR}).collectives, 3);
}

// What is planned is what is done.
TEST(PlanRedistribution, counts_the_collectives_that_run) {
  testing::on_mesh({2, 3}, [](const mesh::DeviceMeshPtr& mesh) {
    const std::vector<Placements> all = {{kR, kR},     {S(0), S(0)}, {SS(0, 3), S(0)}, {kP, S(1)},
                                         {S(1), S(0)}, {kR, S(0)},   {S(0), kR},       {kP, kP}};
    const at::Tensor full = testing::integers({12, 12}, 1);
    for (const Placements& from : all) {
      const at::Tensor source = distribute_tensor(full, mesh, from);
      for (const Placements& to : all) {
        const auto issued = [&] {
          return mesh->communicator(0).sequence() + mesh->communicator(1).sequence();
        };
        const uint64_t before = issued();
        redistribute(source, to);
        EXPECT_EQ(issued() - before,
                  plan_redistribution(mesh->shape(), full.sizes(), 4, from, to).collectives)
            << to_string(from) << " -> " << to_string(to);
      }
    }
  });
}

// A mesh dim of one rank has nothing to say, in whatever order it stands.
TEST(PlanRedistribution, mesh_dims_of_one_rank_take_no_part) {
  EXPECT_TRUE(plan_redistribution({1, 4}, {8, 8}, 4, {S(0), S(0)}, {kP, S(0)}).transitions.empty());
  EXPECT_TRUE(
      plan_redistribution({1, 4}, {8, 8}, 4, {SS(0, 4), S(0)}, {S(0), S(0)}).transitions.empty());
}

}  // namespace
}  // namespace ppfsdp::dtensor
