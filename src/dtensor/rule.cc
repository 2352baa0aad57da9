#include "src/dtensor/rule.h"

#include <algorithm>
#include <limits>
#include <unordered_map>

#include "fmt/format.h"
#include "fmt/ranges.h"
#include "src/dtensor/sharding.h"

namespace ppfsdp::dtensor {
namespace {

std::unordered_map<std::string, Rule>& rules() {
  static auto* table = new std::unordered_map<std::string, Rule>;
  return *table;
}

/// Bytes that each rank sends to bring `spec` from its placement along mesh dim `i` to `to`, the
/// same number on every rank, since all must choose alike.
double cost(const Spec& spec, int64_t i, const Placement& to) {
  const Placement& from = spec.placements[i];
  const double count = static_cast<double>(spec.mesh->size(i));
  double bytes = static_cast<double>(c10::elementSize(spec.dtype));
  for (int64_t size : spec.sizes) {
    bytes *= static_cast<double>(size);
  }
  for (int64_t j = 0; j < spec.mesh->ndim(); ++j) {
    if (j != i && splits(spec.placements[j])) {
      bytes /= static_cast<double>(spec.mesh->size(j));
    }
  }
  if (from == to) {
    return 0;
  }
  // Work without communication: small beside any, but not nothing.
  constexpr double kLocalWork = 1e-3;
  double sent = kLocalWork * bytes;
  const double others = (count - 1) / count;
  if (from.is_partial()) {
    sent += bytes * others * (splits(to) ? 1 : 2);
  } else if (splits(from)) {
    const bool sums = to.is_partial() && to.partial_op() == Placement::PartialOp::kSum;
    sent += sums ? 0 : bytes * others / (splits(to) ? count : 1);
  }
  // Counted even for an empty tensor, so that what need not move does not.
  return sent + kLocalWork;
}

}  // namespace

std::string Call::name() const {
  const c10::OperatorName& name = op_.operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

const mesh::DeviceMeshPtr& Call::mesh() const {
  const Operand* first = nullptr;
  for (const Operand& operand : operands_) {
    if (operand.plain) {
      continue;
    }
    first = first == nullptr ? &operand : first;
    TORCH_CHECK(same_mesh(first->spec->mesh, operand.spec->mesh), name(),
                ": the operands are on different meshes, ", first->spec->mesh->str(), " of ranks ",
                c10::ArrayRef<int>(first->spec->mesh->ranks()), " and ", operand.spec->mesh->str(),
                " of ranks ", c10::ArrayRef<int>(operand.spec->mesh->ranks()),
                "; bring them to one mesh first");
  }
  return operands_.front().plain && first != nullptr ? first->spec->mesh
                                                     : operands_.front().spec->mesh;
}

std::optional<size_t> Call::find(std::string_view argument) const {
  const auto& arguments = schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == argument) {
      return i;
    }
  }
  return std::nullopt;
}

const c10::IValue& Call::arg(std::string_view argument) const {
  const std::optional<size_t> index = find(argument);
  TORCH_INTERNAL_ASSERT(index, name(), " has no argument ", std::string(argument));
  return arguments_[*index];
}

std::vector<size_t> Call::operands_of(std::string_view argument) const {
  const std::optional<size_t> index = find(argument);
  std::vector<size_t> found;
  for (size_t i = 0; i < operands_.size(); ++i) {
    if (operands_[i].argument == index) {
      found.push_back(i);
    }
  }
  return found;
}

std::string Call::str() const {
  std::string text = name() + "(";
  // A list of hundreds of parameters says nothing more than its first ones do.
  constexpr size_t kShown = 6;
  for (size_t i = 0; i < operands_.size() && i < kShown; ++i) {
    const Operand& operand = operands_[i];
    text += fmt::format("{}{}: {}[{}]{}", i == 0 ? "" : ", ",
                        schema().arguments()[operand.argument].name(),
                        operand.plain ? "plain " : "", fmt::join(operand.spec->sizes, ", "),
                        operand.plain ? "" : " " + to_string(operand.spec->placements));
  }
  return text + (operands_.size() > kShown ? ", ...)" : ")");
}

void LocalCall::finish(std::initializer_list<c10::IValue> results) const {
  torch::jit::drop(stack, op.schema().arguments().size());
  stack.insert(stack.end(), results.begin(), results.end());
}

RegisterRule::RegisterRule(std::initializer_list<const char*> names, Rule rule) {
  for (const char* name : names) {
    const bool fresh = rules().emplace(std::string("aten::") + name, rule).second;
    TORCH_CHECK(fresh, "two sharding rules for aten::", name);
  }
}

const Rule* find_rule(const std::string& name) {
  const auto found = rules().find(name);
  return found == rules().end() ? nullptr : &found->second;
}

void check_written(const Call& call) {
  for (const Operand& operand : call.operands()) {
    TORCH_CHECK(!(operand.plain && operand.written), call.name(), ": writes to the plain tensor '",
                call.schema().arguments()[operand.argument].name(), "' from DTensors: ", call.str(),
                "; make it a DTensor, or use full_tensor or to_local of the others");
  }
}

std::vector<std::string> rule_names() {
  std::vector<std::string> names;
  for (const auto& item : rules()) {
    names.push_back(item.first);
  }
  std::sort(names.begin(), names.end());
  return names;
}

Choice choose(const Call& call, c10::ArrayRef<size_t> operands,
              const std::function<std::vector<Strategy>(int64_t mesh_dim)>& strategies) {
  const mesh::DeviceMesh& mesh = *call.operands()[operands.front()].spec->mesh;
  const int64_t mesh_ndim = mesh.ndim();
  Choice choice;
  choice.inputs.assign(operands.size(), Placements(mesh_ndim));
  for (int64_t i = 0; i < mesh_ndim; ++i) {
    const std::vector<Strategy> candidates = strategies(i);
    TORCH_INTERNAL_ASSERT(!candidates.empty(), "no strategy for ", call.str());
    const Strategy* best = nullptr;
    double least = std::numeric_limits<double>::infinity();
    for (const Strategy& candidate : candidates) {
      double sum = 0;
      for (size_t k = 0; k < operands.size(); ++k) {
        const Operand& operand = call.operands()[operands[k]];
        const double bytes = cost(*operand.spec, i, candidate.inputs[k]);
        // Far above any real cost.
        constexpr double kMovesWritten = 1e30;
        sum += operand.written && bytes > 0 ? kMovesWritten : bytes;
      }
      if (sum < least) {
        least = sum;
        best = &candidate;
      }
    }
    for (size_t k = 0; k < operands.size(); ++k) {
      choice.inputs[k][i] = best->inputs[k];
    }
    choice.results.resize(best->results.size(), Placements(mesh_ndim));
    for (size_t k = 0; k < best->results.size(); ++k) {
      choice.results[k][i] = best->results[k];
    }
  }
  // Another mesh dim's strategy may have given up a split that a StridedShard counts on.
  for (std::vector<Placements>* all : {&choice.inputs, &choice.results}) {
    for (Placements& placements : *all) {
      placements = with_fitting_splits(mesh.shape(), std::move(placements));
    }
  }
  return choice;
}

Plan plan_by_strategies(const Call& call, const std::vector<std::vector<int64_t>>& result_sizes,
                        const std::function<std::vector<Strategy>(int64_t mesh_dim)>& strategies) {
  call.mesh();
  check_written(call);
  std::vector<size_t> all(call.operands().size());
  for (size_t k = 0; k < all.size(); ++k) {
    all[k] = k;
  }
  Choice choice = choose(call, all, strategies);
  Plan plan;
  plan.inputs = std::move(choice.inputs);
  for (size_t k = 0; k < result_sizes.size(); ++k) {
    plan.results.push_back({choice.results[k], result_sizes[k]});
  }
  return plan;
}

Placements without_partials(Placements placements) {
  for (Placement& placement : placements) {
    placement = placement.is_partial() ? Placement::replicate() : placement;
  }
  return placements;
}

int64_t existing_dim(const Call& call, int64_t dim, int64_t ndim) {
  TORCH_CHECK(ndim > 0, call.name(), ": needs at least one dim: ", call.str());
  return wrap_dim(call, dim, ndim);
}

int64_t wrap_dim(const Call& call, int64_t dim, int64_t ndim) {
  const int64_t bound = std::max<int64_t>(ndim, 1);
  TORCH_CHECK(dim >= -bound && dim < bound, call.name(), ": dim ", dim,
              " is out of range for a tensor of ", ndim, " dims");
  return dim < 0 ? dim + bound : dim;
}

}  // namespace ppfsdp::dtensor
