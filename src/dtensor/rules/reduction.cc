#include "src/dtensor/rules/reduction.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/div.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sum.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "src/dtensor/sharding.h"

namespace ppfsdp::dtensor {
namespace {

using Op = Placement::PartialOp;

bool folds(const Reduction& reduction, int64_t dim) {
  return std::find(reduction.dims.begin(), reduction.dims.end(), dim) != reduction.dims.end();
}

/// Where dim `dim` of the input is in the result.
int64_t result_dim(const Reduction& reduction, int64_t dim) {
  if (reduction.keepdim) {
    return dim;
  }
  return dim - std::count_if(reduction.dims.begin(), reduction.dims.end(),
                             [&](int64_t folded) { return folded < dim; });
}

std::vector<int64_t> result_sizes(const Call& call, const Reduction& reduction) {
  std::vector<int64_t> sizes;
  for (int64_t dim = 0; dim < call.ndim(); ++dim) {
    if (!folds(reduction, dim)) {
      sizes.push_back(call.sizes()[dim]);
    } else if (reduction.keepdim) {
      sizes.push_back(1);
    }
  }
  return sizes;
}

std::vector<Strategy> reduction_strategies(const Call& call, const Reduction& reduction,
                                           int64_t mesh_dim) {
  const Placement& now = call.self().spec->placements[mesh_dim];
  const Placement whole = Placement::replicate();
  const auto all = [&](const Placement& placement) {
    return Placements(reduction.results, placement);
  };
  std::vector<Strategy> strategies;
  if (splits(now) && !folds(reduction, now.dim())) {
    const int64_t dim = result_dim(reduction, now.dim());
    strategies.push_back({{now},
                          all(now.is_shard() ? Placement::shard(dim)
                                             : Placement::strided_shard(dim, now.split_factor()))});
  } else if (splits(now) && reduction.partial) {
    strategies.push_back({{now}, all(*reduction.partial)});
  }
  if (std::find(reduction.passes.begin(), reduction.passes.end(), now) != reduction.passes.end()) {
    strategies.push_back({{now}, all(now)});
  }
  strategies.push_back({{whole}, all(whole)});
  return strategies;
}

/// The fold is one of some elements, but of none on this rank. (A fold of none at all is an error,
/// or not, on every rank alike.)
bool folds_none_here(const Spec& spec, const Reduction& reduction) {
  bool none_here = false;
  for (int64_t dim = 0; dim < spec.ndim(); ++dim) {
    if (folds(reduction, dim) && spec.sizes[dim] == 0) {
      return false;
    }
    none_here = none_here || (spec.local_sizes[dim] == 0 && spec.sizes[dim] > 0);
  }
  return none_here;
}

/// The argument "dtype", where the op has one and it is given.
std::optional<at::ScalarType> dtype_argument(const LocalCall& call) {
  const auto& arguments = call.op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == "dtype") {
      return call.arg(i).toOptional<at::ScalarType>();
    }
  }
  return std::nullopt;
}

/// Runs in place of a fold that LibTorch refuses for no elements: the value that changes nothing,
/// which is the dtype's least or greatest where `value` is infinite.
LocalFunction filled(const std::vector<int64_t>& sizes, double value) {
  return [sizes, value](const LocalCall& call) {
    const at::Tensor self = call.arg(0).toTensor();
    at::Scalar fill = value;
    if (std::isinf(value) && c10::isIntegralType(self.scalar_type(), /*includeBool=*/false)) {
      AT_DISPATCH_INTEGRAL_TYPES(self.scalar_type(), "fold of no elements", [&] {
        fill = value > 0 ? std::numeric_limits<scalar_t>::max()
                         : std::numeric_limits<scalar_t>::lowest();
      });
    } else if (self.scalar_type() == at::kBool) {
      fill = value > 0;
    }
    const auto dtype = dtype_argument(call);
    // A norm of complex numbers is real; no other fold that comes here takes them.
    const auto of_result = c10::toRealValueType(dtype.value_or(self.scalar_type()));
    call.finish({at::full(sizes, fill, self.options().dtype(of_result))});
  };
}

}  // namespace

Plan reduce(const Call& call, const Reduction& reduction, bool* splits_folded) {
  Plan plan = plan_by_strategies(
      call, std::vector<std::vector<int64_t>>(reduction.results, result_sizes(call, reduction)),
      [&](int64_t mesh_dim) { return reduction_strategies(call, reduction, mesh_dim); });
  if (splits_folded != nullptr) {
    *splits_folded = std::any_of(plan.inputs.front().begin(), plan.inputs.front().end(),
                                 [&](const Placement& placement) {
                                   return splits(placement) && folds(reduction, placement.dim());
                                 });
  }
  return plan;
}

Reduction reduction_of(const Call& call) {
  Reduction reduction;
  const int64_t ndim = call.ndim();
  std::vector<int64_t> dims;
  if (call.find("dim")) {
    const c10::IValue& value = call.arg("dim");
    if (value.isInt()) {
      dims.push_back(value.toInt());
    } else if (value.isIntList()) {
      dims = value.toIntVector();
    }
  }
  if (dims.empty()) {
    for (int64_t dim = 0; dim < ndim; ++dim) {
      reduction.dims.push_back(dim);
    }
  } else {
    for (int64_t dim : dims) {
      reduction.dims.push_back(wrap_dim(call, dim, ndim));
    }
    std::sort(reduction.dims.begin(), reduction.dims.end());
  }
  reduction.keepdim = call.find("keepdim") && call.arg("keepdim").toBool();
  return reduction;
}

Placement norm_partial(double order) {
  if (std::isinf(order)) {
    return Placement::partial(order > 0 ? Op::kMax : Op::kMin);
  }
  return order == 0 ? Placement::partial(Op::kSum) : Placement::partial(Op::kNorm, order);
}

namespace {

const Placement kPartialSum = Placement::partial(Op::kSum);
const Placement kPartialAvg = Placement::partial(Op::kAvg);
const Placement kPartialMax = Placement::partial(Op::kMax);
const Placement kPartialMin = Placement::partial(Op::kMin);

Rule sum_rule() {
  return {[](const Call& call) {
    Reduction reduction = reduction_of(call);
    reduction.partial = kPartialSum;
    reduction.passes = {kPartialSum, kPartialAvg};
    return reduce(call, reduction);
  }};
}

/// The mean of a split dim is the sum over the global count: the mean of the shards' means would be
/// wrong where shards are uneven.
Rule mean_rule() {
  return {[](const Call& call) {
    Reduction reduction = reduction_of(call);
    reduction.partial = kPartialSum;
    reduction.passes = {kPartialSum, kPartialAvg};
    bool splits_folded = false;
    Plan plan = reduce(call, reduction, &splits_folded);
    if (!splits_folded) {
      return plan;
    }
    int64_t count = 1;
    for (int64_t dim : reduction.dims) {
      count *= call.sizes()[dim];
    }
    const size_t dtype = *call.find("dtype");
    plan.local = [reduction, count, dtype](const LocalCall& local) {
      const at::Tensor self = local.arg(0).toTensor();
      const auto to = local.arg(dtype).toOptional<at::ScalarType>();
      TORCH_CHECK(at::isFloatingType(to.value_or(self.scalar_type())) ||
                      at::isComplexType(to.value_or(self.scalar_type())),
                  "mean(): needs a floating point dtype, got ", self.scalar_type());
      // A sum may not fit into the half types though the mean does.
      const at::ScalarType of_result = to.value_or(self.scalar_type());
      const bool half = of_result == at::kHalf || of_result == at::kBFloat16;
      const at::ScalarType of_sum = half ? at::kFloat : of_result;
      const at::Tensor sum = at::sum(self, reduction.dims, reduction.keepdim, of_sum);
      local.finish({at::div(sum, count).to(of_result)});
    };
    return plan;
  }};
}

/// max, min, all, any: the folds of the shards' folds. `none` is the fold of no elements.
Rule extreme_rule(const Placement& partial, double none, bool of_none_fails) {
  return {[partial, none, of_none_fails](const Call& call) {
    Reduction reduction = reduction_of(call);
    reduction.partial = partial;
    bool splits_folded = false;
    Plan plan = reduce(call, reduction, &splits_folded);
    if (splits_folded && of_none_fails && folds_none_here(*call.self().spec, reduction)) {
      const Result& result = plan.results.front();
      plan.local = filled(
          local_sizes(result.sizes, *call.mesh(), result.placements, call.mesh()->coordinates()),
          none);
    }
    return plan;
  }};
}

/// Values with their indices, or what is no fold of the shards' folds: the folded dims are whole.
Rule whole_rule(size_t results) {
  return {[results](const Call& call) {
    Reduction reduction = reduction_of(call);
    reduction.results = results;
    return reduce(call, reduction);
  }};
}

Rule norm_rule(const char* order_argument) {
  return {[order_argument](const Call& call) {
    const c10::IValue& order = call.arg(order_argument);
    const double p = order.isNone() ? 2.0 : order.toScalar().toDouble();
    Reduction reduction = reduction_of(call);
    reduction.partial = norm_partial(p);
    bool splits_folded = false;
    Plan plan = reduce(call, reduction, &splits_folded);
    if (splits_folded && (std::isinf(p) || p < 0) &&
        folds_none_here(*call.self().spec, reduction)) {
      const Result& result = plan.results.front();
      plan.local = filled(
          local_sizes(result.sizes, *call.mesh(), result.placements, call.mesh()->coordinates()),
          p > 0 ? 0.0 : std::numeric_limits<double>::infinity());
    }
    return plan;
  }};
}

constexpr double kInfinity = std::numeric_limits<double>::infinity();

const RegisterRule kSum({"sum", "sum.dim_IntList"}, sum_rule());
const RegisterRule kMean({"mean", "mean.dim"}, mean_rule());
const RegisterRule kMax({"max", "amax"}, extreme_rule(kPartialMax, -kInfinity, true));
const RegisterRule kMin({"min", "amin"}, extreme_rule(kPartialMin, kInfinity, true));
const RegisterRule kAny({"any", "any.dim", "any.dims"}, extreme_rule(kPartialMax, 0, false));
const RegisterRule kAll({"all", "all.dim", "all.dims"}, extreme_rule(kPartialMin, 1, false));
const RegisterRule kIndexed({"max.dim", "min.dim", "aminmax"}, whole_rule(2));
const RegisterRule kWhole({"prod", "prod.dim_int", "argmax", "argmin", "var.correction",
                           "std.correction", "logsumexp"},
                          whole_rule(1));
const RegisterRule kNorm({"norm.Scalar", "norm.ScalarOpt_dim", "norm.ScalarOpt_dtype",
                          "norm.ScalarOpt_dim_dtype"},
                         norm_rule("p"));
const RegisterRule kVectorNorm({"linalg_vector_norm"}, norm_rule("ord"));

}  // namespace
}  // namespace ppfsdp::dtensor
