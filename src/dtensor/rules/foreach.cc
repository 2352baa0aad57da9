// Lists of tensors: element i of each list is one pointwise op, with placements and even a mesh of
// its own; a tensor that is not in a list is shared by all and needed whole. In a list of DTensors
// and plain tensors, elements that have no DTensor among them stay plain.
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "src/dtensor/rules/pointwise.h"
#include "src/dtensor/rules/reduction.h"
#include "src/dtensor/sharding.h"

namespace ppfsdp::dtensor {
namespace {

/// groups[i]: the operands (indices) that are element i of the op's lists.
std::vector<std::vector<size_t>> groups_of(const Call& call, std::vector<size_t>& shared) {
  std::vector<std::vector<size_t>> groups;
  size_t element = 0;
  size_t last_argument = call.schema().arguments().size();
  for (size_t k = 0; k < call.operands().size(); ++k) {
    const size_t argument = call.operands()[k].argument;
    element = argument == last_argument ? element + 1 : 0;
    last_argument = argument;
    if (call.schema().arguments()[argument].type()->kind() != c10::TypeKind::ListType) {
      shared.push_back(k);
      continue;
    }
    if (element >= groups.size()) {
      groups.resize(element + 1);
    }
    groups[element].push_back(k);
  }
  const size_t lists = groups.empty() ? 0 : groups.front().size();
  for (const std::vector<size_t>& group : groups) {
    TORCH_CHECK(group.size() == lists, call.name(), ": the lists differ in length: ", call.str());
  }
  return groups;
}

/// One mesh in a group, and nothing plain written.
void check_group(const Call& call, const std::vector<size_t>& group, size_t dtensor) {
  const Operand& first = call.operands()[dtensor];
  for (size_t k : group) {
    const Operand& operand = call.operands()[k];
    const std::string& argument = call.schema().arguments()[operand.argument].name();
    TORCH_CHECK(!operand.plain || !operand.written, call.name(), ": writes to a plain tensor in '",
                argument, "' from DTensors: ", call.str());
    TORCH_CHECK(operand.plain || same_mesh(operand.spec->mesh, first.spec->mesh), call.name(),
                ": elements of one index are on different meshes, ", first.spec->mesh->str(),
                " and ", operand.spec->mesh->str());
  }
}

/// Plans one group into `plan`; `dtensor` is one of its DTensors.
using GroupPlanner = std::function<void(const Call& call, const std::vector<size_t>& group,
                                        size_t dtensor, Plan& plan)>;

Plan plan_groups(const Call& call, const GroupPlanner& planner) {
  std::vector<size_t> shared;
  const std::vector<std::vector<size_t>> groups = groups_of(call, shared);
  Plan plan;
  plan.inputs.resize(call.operands().size());
  plan.mesh_operands.resize(call.operands().size());
  for (size_t k : shared) {
    plan.inputs[k] = Placements(call.operands()[k].spec->placements.size());
  }
  for (const std::vector<size_t>& group : groups) {
    const auto found = std::find_if(group.begin(), group.end(),
                                    [&](size_t k) { return !call.operands()[k].plain; });
    if (found == group.end()) {
      Result result;
      result.plain = true;
      plan.results.push_back(result);
      continue;
    }
    // Plain elements are on the mesh of their own group.
    const Spec& spec = *call.operands()[*found].spec;
    std::vector<Operand> operands = call.operands();
    for (size_t k : group) {
      plan.mesh_operands[k] = *found;
      if (operands[k].plain) {
        const Spec& own = *operands[k].spec;
        operands[k].spec =
            make_spec(spec.mesh, Placements(spec.mesh->ndim()), own.sizes, own.strides, own.dtype);
      }
    }
    check_group(call, group, *found);
    planner(call.with_operands(std::move(operands)), group, *found, plan);
  }
  return plan;
}

Rule foreach_pointwise() {
  return {[](const Call& lists) {
            return plan_groups(lists, [](const Call& call, const std::vector<size_t>& group,
                                         size_t dtensor, Plan& plan) {
              const std::vector<int64_t> sizes = broadcast_sizes(call, group);
              const Choice choice = choose(call, group, [&](int64_t mesh_dim) {
                return pointwise_strategies(call, group, sizes, Linear::kNo, mesh_dim);
              });
              for (size_t k = 0; k < group.size(); ++k) {
                plan.inputs[group[k]] = choice.inputs[k];
              }
              plan.results.push_back({choice.results.front(), sizes, dtensor});
            });
          },
          /*reads_arguments=*/false};
}

/// The norm of no elements, which LibTorch refuses for some orders.
double norm_of_none(double order) {
  return order < 0 ? std::numeric_limits<double>::infinity() : 0.0;
}

/// _foreach_norm where this rank's part of tensor i is empty, though the tensor is not, if
/// none_here[i].
LocalFunction foreach_norm_with_none(const std::vector<bool>& none_here) {
  return [none_here](const LocalCall& call) {
    const std::vector<at::Tensor> tensors = call.arg(0).toTensorVector();
    const at::Scalar order = call.arg(1).toScalar();
    const auto dtype = call.arg(2).toOptional<at::ScalarType>();
    std::vector<at::Tensor> filled;
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (!none_here[i]) {
        filled.push_back(tensors[i]);
      }
    }
    const std::vector<at::Tensor> norms =
        filled.empty() ? filled : at::_foreach_norm(filled, order, dtype);
    c10::List<at::Tensor> results;
    size_t next = 0;
    for (size_t i = 0; i < tensors.size(); ++i) {
      const auto of_result = c10::toRealValueType(dtype.value_or(tensors[i].scalar_type()));
      results.push_back(none_here[i] ? at::full({}, norm_of_none(order.toDouble()),
                                                tensors[i].options().dtype(of_result))
                                     : norms[next++]);
    }
    call.finish({results});
  };
}

Rule foreach_norm() {
  return {[](const Call& call) {
    const Placement partial = norm_partial(call.arg("ord").toScalar().toDouble());
    Plan plan = plan_groups(
        call, [&](const Call& lists, const std::vector<size_t>& group, size_t dtensor, Plan& plan) {
          Placements inputs = lists.operands()[dtensor].spec->placements;
          Placements results;
          for (Placement& placement : inputs) {
            placement = splits(placement) ? placement : Placement::replicate();
            results.push_back(splits(placement) ? partial : placement);
          }
          plan.inputs[group.front()] = inputs;
          plan.results.push_back({results, {}, dtensor});
        });
    std::vector<bool> none_here;
    for (const Operand& operand : call.operands()) {
      const auto& sizes = operand.spec->local_sizes;
      const auto& whole = operand.spec->sizes;
      // Of a tensor that has no elements at all LibTorch says what it has to say, on every rank.
      none_here.push_back(std::count(sizes.begin(), sizes.end(), 0) > 0 &&
                          std::count(whole.begin(), whole.end(), 0) == 0);
    }
    if (std::count(none_here.begin(), none_here.end(), true) > 0) {
      plan.local = foreach_norm_with_none(none_here);
    }
    return plan;
  }};
}

const RegisterRule kPointwise(
    {
        "_foreach_add.Scalar",
        "_foreach_add_.Scalar",
        "_foreach_add.List",
        "_foreach_add_.List",
        "_foreach_add.ScalarList",
        "_foreach_add_.ScalarList",
        "_foreach_add.Tensor",
        "_foreach_add_.Tensor",
        "_foreach_sub.Scalar",
        "_foreach_sub_.Scalar",
        "_foreach_sub.List",
        "_foreach_sub_.List",
        "_foreach_sub.ScalarList",
        "_foreach_sub_.ScalarList",
        "_foreach_mul.Scalar",
        "_foreach_mul_.Scalar",
        "_foreach_mul.List",
        "_foreach_mul_.List",
        "_foreach_mul.ScalarList",
        "_foreach_mul_.ScalarList",
        "_foreach_mul.Tensor",
        "_foreach_mul_.Tensor",
        "_foreach_div.Scalar",
        "_foreach_div_.Scalar",
        "_foreach_div.List",
        "_foreach_div_.List",
        "_foreach_div.ScalarList",
        "_foreach_div_.ScalarList",
        "_foreach_div.Tensor",
        "_foreach_div_.Tensor",
        "_foreach_addcmul.Scalar",
        "_foreach_addcmul_.Scalar",
        "_foreach_addcmul.ScalarList",
        "_foreach_addcmul_.ScalarList",
        "_foreach_addcmul.Tensor",
        "_foreach_addcmul_.Tensor",
        "_foreach_addcdiv.Scalar",
        "_foreach_addcdiv_.Scalar",
        "_foreach_addcdiv.ScalarList",
        "_foreach_addcdiv_.ScalarList",
        "_foreach_addcdiv.Tensor",
        "_foreach_addcdiv_.Tensor",
        "_foreach_lerp.List",
        "_foreach_lerp_.List",
        "_foreach_lerp.Scalar",
        "_foreach_lerp_.Scalar",
        "_foreach_lerp.ScalarList",
        "_foreach_lerp_.ScalarList",
        "_foreach_pow.List",
        "_foreach_pow.Scalar",
        "_foreach_pow.ScalarList",
        "_foreach_pow.ScalarAndTensor",
        "_foreach_pow_.List",
        "_foreach_pow_.Scalar",
        "_foreach_pow_.ScalarList",
        "_foreach_maximum.Scalar",
        "_foreach_maximum_.Scalar",
        "_foreach_maximum.List",
        "_foreach_maximum_.List",
        "_foreach_maximum.ScalarList",
        "_foreach_maximum_.ScalarList",
        "_foreach_minimum.Scalar",
        "_foreach_minimum_.Scalar",
        "_foreach_minimum.List",
        "_foreach_minimum_.List",
        "_foreach_minimum.ScalarList",
        "_foreach_minimum_.ScalarList",
        "_foreach_clamp_min.Scalar",
        "_foreach_clamp_min_.Scalar",
        "_foreach_clamp_min.List",
        "_foreach_clamp_min_.List",
        "_foreach_clamp_min.ScalarList",
        "_foreach_clamp_min_.ScalarList",
        "_foreach_clamp_max.Scalar",
        "_foreach_clamp_max_.Scalar",
        "_foreach_clamp_max.List",
        "_foreach_clamp_max_.List",
        "_foreach_clamp_max.ScalarList",
        "_foreach_clamp_max_.ScalarList",
        "_foreach_copy_",
        "_foreach_zero_",
        "_foreach_abs",
        "_foreach_abs_",
        "_foreach_ceil",
        "_foreach_ceil_",
        "_foreach_cos",
        "_foreach_cos_",
        "_foreach_exp",
        "_foreach_exp_",
        "_foreach_floor",
        "_foreach_floor_",
        "_foreach_log",
        "_foreach_log_",
        "_foreach_neg",
        "_foreach_neg_",
        "_foreach_reciprocal",
        "_foreach_reciprocal_",
        "_foreach_round",
        "_foreach_round_",
        "_foreach_rsqrt",
        "_foreach_rsqrt_",
        "_foreach_sigmoid",
        "_foreach_sigmoid_",
        "_foreach_sign",
        "_foreach_sign_",
        "_foreach_sin",
        "_foreach_sin_",
        "_foreach_sqrt",
        "_foreach_sqrt_",
        "_foreach_tanh",
        "_foreach_tanh_",
        "_foreach_trunc",
        "_foreach_trunc_",
    },
    foreach_pointwise());

const RegisterRule kFused({"_fused_adam_", "_fused_adam_.tensor_lr", "_fused_adamw_",
                           "_fused_adamw_.tensor_lr", "_fused_sgd_", "_fused_sgd_.tensor_lr",
                           "_fused_adagrad_"},
                          foreach_pointwise());

const RegisterRule kNorm({"_foreach_norm.Scalar"}, foreach_norm());

}  // namespace
}  // namespace ppfsdp::dtensor
