#include <algorithm>

#include "src/dtensor/rule.h"
#include "src/dtensor/sharding.h"

namespace ppfsdp::dtensor {
namespace {

/// A tensor of sizes [0] is left out by cat, whatever the others' sizes are.
bool left_out(const Operand& operand) { return operand.spec->sizes == std::vector<int64_t>{0}; }

/// All as one of them is, split where the joined dim is not concerned, or partial: joining commutes
/// with every reduction. `result` gives a placement's form in the result, or none.
Plan join(const Call& call, const std::vector<int64_t>& sizes,
          const std::function<std::optional<Placement>(const Placement&)>& result) {
  return plan_by_strategies(call, {sizes}, [&](int64_t mesh_dim) {
    std::vector<Strategy> strategies;
    std::vector<Placement> seen = {Placement::replicate()};
    const auto add = [&](const Placement& placement, const Placement& joined) {
      Strategy strategy{{}, {joined}};
      for (const Operand& operand : call.operands()) {
        strategy.inputs.push_back(left_out(operand) ? Placement::replicate() : placement);
      }
      strategies.push_back(std::move(strategy));
    };
    for (const Operand& operand : call.operands()) {
      const Placement& now = operand.spec->placements[mesh_dim];
      if (left_out(operand) || std::find(seen.begin(), seen.end(), now) != seen.end()) {
        continue;
      }
      seen.push_back(now);
      if (const std::optional<Placement> joined = result(now)) {
        add(now, *joined);
      }
    }
    add(Placement::replicate(), Placement::replicate());
    return strategies;
  });
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
  return join(call, sizes, [&](const Placement& placement) -> std::optional<Placement> {
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
  const int64_t dim = wrap_dim(call, call.arg("dim").toInt(), static_cast<int64_t>(sizes.size()));
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
  return join(call, sizes, [&](const Placement& placement) -> std::optional<Placement> {
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
