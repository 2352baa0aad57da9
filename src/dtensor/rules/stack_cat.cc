#include <algorithm>
#include <functional>
#include <map>

#include "src/dtensor/redistribute.h"
#include "src/dtensor/rule.h"
#include "src/dtensor/sharding.h"

namespace ppfsdp::dtensor {
namespace {

/// A tensor of sizes [0] is left out by cat, whatever the others' sizes are.
bool left_out(const Operand& operand) { return operand.spec->sizes == std::vector<int64_t>{0}; }

bool is_norm(const Placement& placement) {
  return placement.partial_op() == Placement::PartialOp::kNorm;
}

/// What an operand is of the result: part(result, k) is where operand k has gone.
using Part = std::function<at::Tensor(const at::Tensor& result, size_t operand)>;

/// Runs the op on some values that are partial norms along a mesh dim and some that are whole
/// (which may be negative, and so are no one's partial norms), for each mesh dim in `norms`: one
/// reduction for all of them.
LocalFunction with_norms_reduced(const Call& call, const std::map<int64_t, Placement>& norms,
                                 const Part& part) {
  std::vector<Placements> placements;
  for (const Operand& operand : call.operands()) {
    placements.push_back(operand.spec->placements);
  }
  return [placements, norms, part](const LocalCall& local) {
    local.call();
    at::Tensor result = local.stack.back().toTensor().contiguous();
    for (const auto& [mesh_dim, norm] : norms) {
      const at::Tensor before = result.clone();
      reduce_along(result, *local.mesh, mesh_dim, norm);
      for (size_t k = 0; k < placements.size(); ++k) {
        if (placements[k][mesh_dim] != norm) {
          part(result, k).copy_(part(before, k));
        }
      }
    }
    local.stack.back() = result;
  };
}

/// All as one of them is, split where the joined dim is not concerned, or partial: joining commutes
/// with every reduction. `result` gives a placement's form in the result, or none.
Plan join(const Call& call, const std::vector<int64_t>& sizes, const Part& part,
          const std::function<std::optional<Placement>(const Placement&)>& result) {
  std::map<int64_t, Placement> norms;
  Plan plan = plan_by_strategies(call, {sizes}, [&](int64_t mesh_dim) {
    std::vector<Strategy> strategies;
    std::vector<Placement> seen = {Placement::replicate()};
    const auto add = [&](const Placement& placement, const Placement& joined) {
      Strategy strategy{{}, {joined}};
      for (const Operand& operand : call.operands()) {
        strategy.inputs.push_back(left_out(operand) ? Placement::replicate() : placement);
      }
      strategies.push_back(std::move(strategy));
    };
    const auto is = [&](const Operand& operand, const Placement& placement) {
      return operand.spec->placements[mesh_dim] == placement;
    };
    for (const Operand& operand : call.operands()) {
      const Placement& now = operand.spec->placements[mesh_dim];
      if (left_out(operand) || std::find(seen.begin(), seen.end(), now) != seen.end()) {
        continue;
      }
      seen.push_back(now);
      const bool all =
          std::all_of(call.operands().begin(), call.operands().end(),
                      [&](const Operand& other) { return left_out(other) || is(other, now); });
      if (is_norm(now) && !all && norms.count(mesh_dim) == 0) {
        norms[mesh_dim] = now;
        Strategy strategy{{}, {Placement::replicate()}};
        for (const Operand& other : call.operands()) {
          strategy.inputs.push_back(is(other, now) ? now : Placement::replicate());
        }
        strategies.push_back(std::move(strategy));
      } else if (const std::optional<Placement> joined = result(now); joined && !is_norm(now)) {
        add(now, *joined);
      } else if (is_norm(now) && all) {
        add(now, now);
      }
    }
    add(Placement::replicate(), Placement::replicate());
    return strategies;
  });
  // Only where that strategy was chosen.
  std::erase_if(norms, [&](const auto& item) {
    return std::none_of(plan.inputs.begin(), plan.inputs.end(),
                        [&](const Placements& to) { return to[item.first] == item.second; });
  });
  if (!norms.empty()) {
    plan.local = with_norms_reduced(call, norms, part);
  }
  return plan;
}

Placement on_dim(const Placement& placement, int64_t dim) {
  return placement.is_shard() ? Placement::shard(dim)
                              : Placement::strided_shard(dim, placement.split_factor());
}

Plan stack(const Call& call) {
  const int64_t dim = wrap_dim(call, call.arg("dim").toInt(), call.ndim() + 1);
  for (const Operand& operand : call.operands()) {
    TORCH_CHECK(operand.spec->sizes == call.sizes(),
                "stack: the global sizes differ: ", call.str());
  }
  std::vector<int64_t> sizes = call.sizes();
  sizes.insert(sizes.begin() + dim, static_cast<int64_t>(call.operands().size()));
  const Part part = [dim](const at::Tensor& result, size_t k) {
    return result.select(dim, static_cast<int64_t>(k));
  };
  return join(call, sizes, part, [&](const Placement& placement) -> std::optional<Placement> {
    if (!splits(placement)) {
      return placement;
    }
    return on_dim(placement, placement.dim() + (placement.dim() >= dim ? 1 : 0));
  });
}

Plan cat(const Call& call) {
  const auto& operands = call.operands();
  const auto first = std::find_if_not(operands.begin(), operands.end(), left_out);
  std::vector<int64_t> sizes =
      first == operands.end() ? std::vector<int64_t>{0} : first->spec->sizes;
  const int64_t dim =
      existing_dim(call, call.arg("dim").toInt(), static_cast<int64_t>(sizes.size()));
  sizes[dim] = 0;
  for (const Operand& operand : operands) {
    if (left_out(operand)) {
      continue;
    }
    std::vector<int64_t> own = operand.spec->sizes;
    TORCH_CHECK(own.size() == sizes.size(), "cat: the numbers of dims differ: ", call.str());
    sizes[dim] += own[dim];
    own[dim] = sizes[dim];
    TORCH_CHECK(own == sizes, "cat: the global sizes differ beside dim ", dim, ": ", call.str());
  }
  std::vector<ShardRange> ranges;
  int64_t offset = 0;
  for (const Operand& operand : operands) {
    const int64_t length = left_out(operand) ? 0 : operand.spec->sizes[dim];
    ranges.push_back({offset, length});
    offset += length;
  }
  const Part part = [dim, ranges](const at::Tensor& result, size_t k) {
    return result.narrow(dim, ranges[k].offset, ranges[k].length);
  };
  return join(call, sizes, part, [&](const Placement& placement) -> std::optional<Placement> {
    if (splits(placement, dim)) {
      return std::nullopt;
    }
    return placement;
  });
}

const RegisterRule kStack({"stack"}, {stack});
const RegisterRule kCat({"cat"}, {cat});

}  // namespace
}  // namespace ppfsdp::dtensor
