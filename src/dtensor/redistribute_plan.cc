#include "src/dtensor/redistribute_plan.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <queue>
#include <tuple>
#include <utility>

#include "src/dtensor/sharding.h"

namespace ppfsdp::dtensor {
namespace {

/// What one mesh dim may be; from kSplit on, a split of tensor dim code - kSplit.
enum Code : int64_t { kWhole, kSourcePartial, kTargetPartial, kSplit };

/// For each mesh dim its code and, of a split, how many splits of the same dim are outside of it.
using State = std::vector<std::pair<int64_t, int64_t>>;

/// Bytes with the collectives' share, then transitions.
using Cost = std::pair<int64_t, int64_t>;

struct Move {
  size_t mesh_dim = 0;
  int64_t code = 0;
  int64_t bytes = 0;
  bool communicates = false;
};

struct Visit {
  Cost cost;
  State before;
  Move move;
  bool settled = false;
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

class Search {
 public:
  Search(const std::vector<int64_t>& mesh_shape, c10::ArrayRef<int64_t> sizes, int64_t element_size,
         const Placements& from, const Placements& to)
      : mesh_shape_(mesh_shape), sizes_(sizes), element_size_(element_size), from_(from), to_(to) {}

  RedistributionPlan run() {
    const State start = state_of(from_, kSourcePartial);
    State goal = state_of(to_, kTargetPartial);
    for (size_t i = 0; i < goal.size(); ++i) {
      if (goal[i].first == kTargetPartial && from_[i] == to_[i]) {
        goal[i].first = kSourcePartial;
      }
    }
    visits_[start] = {{0, 0}, {}, {}};
    // Of equal costs the state that was found first comes first, which is the same on every rank.
    using Item = std::tuple<Cost, int64_t, State>;
    std::priority_queue<Item, std::vector<Item>, std::greater<>> queue;
    int64_t found = 0;
    queue.push({{0, 0}, found++, start});
    while (true) {
      TORCH_INTERNAL_ASSERT(!queue.empty(), "no transitions lead from ", to_string(from_), " to ",
                            to_string(to_));
      const State state = std::get<2>(queue.top());
      queue.pop();
      Visit& visit = visits_[state];
      if (visit.settled) {
        continue;
      }
      visit.settled = true;
      if (state == goal) {
        return plan_to(state);
      }
      const Cost cost = visit.cost;
      for (const Move& move : moves_from(state)) {
        const Cost next = {cost.first + move.bytes + (move.communicates ? kBytesOfACollective : 0),
                           cost.second + 1};
        const State after = moved(state, move);
        const auto [known, fresh] = visits_.try_emplace(after, Visit{next, state, move});
        if (fresh || next < known->second.cost) {
          known->second = {next, state, move};
          queue.push({next, found++, after});
        }
      }
    }
  }

 private:
  State state_of(const Placements& placements, int64_t partial) const {
    State state(mesh_shape_.size(), {kWhole, 0});
    for (size_t i = 0; i < state.size(); ++i) {
      if (mesh_shape_[i] > 1 && placements[i].is_partial()) {
        state[i].first = partial;
      }
    }
    for (size_t dim = 0; dim < sizes_.size(); ++dim) {
      int64_t position = 0;
      for (int64_t i : shard_order(mesh_shape_, placements, static_cast<int64_t>(dim))) {
        if (mesh_shape_[i] > 1) {
          state[i] = {kSplit + static_cast<int64_t>(dim), position++};
        }
      }
    }
    return state;
  }

  static int64_t splits_of(const State& state, int64_t code) {
    return std::count_if(state.begin(), state.end(),
                         [&](const auto& item) { return item.first == code; });
  }

  static State moved(State state, const Move& move) {
    const int64_t position = move.code >= kSplit ? splits_of(state, move.code) : 0;
    state[move.mesh_dim] = {move.code, position};
    return state;
  }

  /// Elements of the largest local part; nested splits shorten a dim as one into as many parts.
  /// `extra`: a mesh dim that splits dim `extra_code` beside what it does now.
  int64_t numel(const State& state, size_t extra = 0, int64_t extra_code = -1) const {
    int64_t product = 1;
    for (size_t dim = 0; dim < sizes_.size(); ++dim) {
      const int64_t code = kSplit + static_cast<int64_t>(dim);
      int64_t parts = extra_code == code ? mesh_shape_[extra] : 1;
      for (size_t i = 0; i < state.size(); ++i) {
        parts *= state[i].first == code ? mesh_shape_[i] : 1;
      }
      product *= ceil_div(sizes_[dim], parts);
    }
    return product;
  }

  std::vector<Move> moves_from(const State& state) const {
    std::vector<Move> moves;
    const int64_t whole = numel(state);
    for (size_t i = 0; i < state.size(); ++i) {
      const int64_t n = mesh_shape_[i];
      const auto [code, position] = state[i];
      const bool split = code >= kSplit;
      if (n == 1 || code == kTargetPartial || (split && position + 1 != splits_of(state, code))) {
        continue;
      }
      const auto add = [&](int64_t to, int64_t elements, bool communicates = true) {
        moves.push_back({i, to, elements * element_size_, communicates});
      };
      for (size_t dim = 0; dim < sizes_.size(); ++dim) {
        const int64_t to = kSplit + static_cast<int64_t>(dim);
        if (to != code) {
          const bool sends = code != kWhole;
          add(to, sends ? (n - 1) * numel(state, i, to) : 0, sends);
        }
      }
      if (split) {
        add(kWhole, (n - 1) * whole);
      } else if (code == kSourcePartial) {
        add(kWhole, 2 * (n - 1) * ceil_div(whole, n));
      }
      const bool sums = to_[i].partial_op() == Placement::PartialOp::kSum;
      if (to_[i].is_partial() && (code == kWhole || (split && sums))) {
        add(from_[i] == to_[i] ? kSourcePartial : kTargetPartial, 0, false);
      }
    }
    return moves;
  }

  RedistributionPlan plan_to(State state) const {
    RedistributionPlan plan;
    for (const Visit* visit = &visits_.at(state); !visit->before.empty();
         visit = &visits_.at(visit->before)) {
      const Move& move = visit->move;
      const auto i = static_cast<int64_t>(move.mesh_dim);
      const Placement to = move.code >= kSplit   ? Placement::shard(move.code - kSplit)
                           : move.code == kWhole ? Placement::replicate()
                                                 : to_[i];
      plan.transitions.push_back({i, to});
      plan.bytes += move.bytes;
      plan.collectives += move.communicates ? 1 : 0;
    }
    std::reverse(plan.transitions.begin(), plan.transitions.end());
    return plan;
  }

  const std::vector<int64_t>& mesh_shape_;
  c10::ArrayRef<int64_t> sizes_;
  int64_t element_size_;
  const Placements& from_;
  const Placements& to_;
  std::map<State, Visit> visits_;
};

}  // namespace

RedistributionPlan plan_redistribution(const std::vector<int64_t>& mesh_shape,
                                       c10::ArrayRef<int64_t> sizes, int64_t element_size,
                                       const Placements& from, const Placements& to) {
  return Search(mesh_shape, sizes, element_size, from, to).run();
}

}  // namespace ppfsdp::dtensor
