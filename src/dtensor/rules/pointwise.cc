#include "src/dtensor/rules/pointwise.h"

#include <algorithm>

#include "src/dtensor/sharding.h"

namespace ppfsdp::dtensor {
namespace {

using Op = Placement::PartialOp;

/// `placement` with its split on another dim.
Placement moved(const Placement& placement, int64_t dim) {
  return placement.is_shard() ? Placement::shard(dim)
                              : Placement::strided_shard(dim, placement.split_factor());
}

bool adds(const Placement& placement) {
  return placement.is_partial() &&
         (placement.partial_op() == Op::kSum || placement.partial_op() == Op::kAvg);
}

void add_partial_strategies(const Placements& now, Linear linear, std::vector<Strategy>& out) {
  const Placement whole = Placement::replicate();
  for (size_t k = 0; k < now.size(); ++k) {
    const Placement& partial = now[k];
    if (!adds(partial)) {
      continue;
    }
    switch (linear) {
      case Linear::kNo:
        break;
      case Linear::kUnary:
      case Linear::kSum:
        out.push_back({Placements(now.size(), partial), {partial}});
        break;
      case Linear::kQuotient:
        if (k != 0) {
          break;
        }
        [[fallthrough]];
      case Linear::kProduct: {
        Placements inputs(now.size(), whole);
        inputs[k] = partial;
        out.push_back({std::move(inputs), {partial}});
        break;
      }
    }
  }
}

}  // namespace

std::vector<int64_t> broadcast_sizes(const Call& call, c10::ArrayRef<size_t> operands) {
  std::vector<int64_t> sizes;
  for (size_t k : operands) {
    const std::vector<int64_t>& other = call.operands()[k].spec->sizes;
    if (other.size() > sizes.size()) {
      sizes.insert(sizes.begin(), other.size() - sizes.size(), 1);
    }
    const size_t lead = sizes.size() - other.size();
    for (size_t dim = 0; dim < other.size(); ++dim) {
      int64_t& size = sizes[lead + dim];
      TORCH_CHECK(size == other[dim] || size == 1 || other[dim] == 1, call.name(),
                  ": the global sizes do not broadcast: ", call.str());
      size = size == 1 ? other[dim] : size;
    }
  }
  for (size_t k : operands) {
    const Operand& operand = call.operands()[k];
    TORCH_CHECK(!operand.written || operand.spec->sizes == sizes, call.name(),
                ": writes in place to a tensor of sizes ", c10::IntArrayRef(operand.spec->sizes),
                " what broadcasts to ", c10::IntArrayRef(sizes), ": ", call.str());
  }
  return sizes;
}

std::vector<Strategy> pointwise_strategies(const Call& call, c10::ArrayRef<size_t> operands,
                                           const std::vector<int64_t>& sizes, Linear linear,
                                           int64_t mesh_dim) {
  std::vector<Strategy> strategies;
  Placements now;
  for (size_t k : operands) {
    now.push_back(call.operands()[k].spec->placements[mesh_dim]);
  }
  const auto lead = [&](size_t k) {
    return static_cast<int64_t>(sizes.size()) - call.operands()[operands[k]].spec->ndim();
  };
  for (size_t k = 0; k < now.size(); ++k) {
    if (!splits(now[k])) {
      continue;
    }
    const int64_t dim = now[k].dim() + lead(k);
    Strategy strategy;
    for (size_t other = 0; other < now.size(); ++other) {
      const int64_t own = dim - lead(other);
      const std::vector<int64_t>& own_sizes = call.operands()[operands[other]].spec->sizes;
      // What is broadcast along the dim is needed whole.
      strategy.inputs.push_back(own >= 0 && own_sizes[own] == sizes[dim] ? moved(now[k], own)
                                                                         : Placement::replicate());
    }
    strategy.results.push_back(moved(now[k], dim));
    strategies.push_back(std::move(strategy));
  }
  add_partial_strategies(now, linear, strategies);
  // What is written in place has to lie as the result does: a whole tensor times a partial sum is a
  // partial sum, which a whole tensor cannot hold.
  std::erase_if(strategies, [&](const Strategy& strategy) {
    for (size_t k = 0; k < operands.size(); ++k) {
      if (call.operands()[operands[k]].written && strategy.inputs[k] != strategy.results.front()) {
        return true;
      }
    }
    return false;
  });
  strategies.push_back(
      {Placements(operands.size(), Placement::replicate()), {Placement::replicate()}});
  return strategies;
}

Rule pointwise(Linear linear) {
  return {[linear](const Call& call) {
            std::vector<size_t> all(call.operands().size());
            for (size_t k = 0; k < all.size(); ++k) {
              all[k] = k;
            }
            const std::vector<int64_t> sizes = broadcast_sizes(call, all);
            return plan_by_strategies(call, {sizes}, [&](int64_t mesh_dim) {
              return pointwise_strategies(call, all, sizes, linear, mesh_dim);
            });
          },
          /*reads_arguments=*/false};
}

namespace {

const RegisterRule kUnaryScale({"neg", "neg_", "mul.Scalar", "mul_.Scalar", "div.Scalar",
                                "div_.Scalar", "positive"},
                               pointwise(Linear::kUnary));
const RegisterRule kSum({"add.Tensor", "add_.Tensor", "sub.Tensor", "sub_.Tensor", "lerp.Scalar",
                         "lerp_.Scalar"},
                        pointwise(Linear::kSum));
const RegisterRule kProduct({"mul.Tensor", "mul_.Tensor"}, pointwise(Linear::kProduct));
const RegisterRule kQuotient({"div.Tensor", "div_.Tensor"}, pointwise(Linear::kQuotient));

const RegisterRule kUnary(
    {
        "abs",
        "abs_",
        "acos",
        "acos_",
        "acosh",
        "acosh_",
        "asin",
        "asin_",
        "asinh",
        "asinh_",
        "atan",
        "atan_",
        "atanh",
        "atanh_",
        "bitwise_not",
        "bitwise_not_",
        "ceil",
        "ceil_",
        "cos",
        "cos_",
        "cosh",
        "cosh_",
        "erf",
        "erf_",
        "erfc",
        "erfc_",
        "erfinv",
        "erfinv_",
        "exp",
        "exp_",
        "exp2",
        "exp2_",
        "expm1",
        "expm1_",
        "floor",
        "floor_",
        "frac",
        "frac_",
        "isinf",
        "isnan",
        "isneginf",
        "isposinf",
        "log",
        "log_",
        "log10",
        "log10_",
        "log1p",
        "log1p_",
        "log2",
        "log2_",
        "logical_not",
        "logical_not_",
        "nan_to_num",
        "nan_to_num_",
        "reciprocal",
        "reciprocal_",
        "relu",
        "relu_",
        "round",
        "round_",
        "round.decimals",
        "round_.decimals",
        "rsqrt",
        "rsqrt_",
        "sgn",
        "sgn_",
        "sigmoid",
        "sigmoid_",
        "sign",
        "sign_",
        "signbit",
        "silu",
        "silu_",
        "sin",
        "sin_",
        "sinh",
        "sinh_",
        "sqrt",
        "sqrt_",
        "tan",
        "tan_",
        "tanh",
        "tanh_",
        "trunc",
        "trunc_",
        "gelu",
        "gelu_",
        "elu",
        "elu_",
        "hardtanh",
        "hardtanh_",
        "leaky_relu",
        "leaky_relu_",
        "softplus",
        "threshold",
        "threshold_",
        "hardswish",
        "hardswish_",
        "hardsigmoid",
        "hardsigmoid_",
        "mish",
        "mish_",
    },
    pointwise());

const RegisterRule kWithScalar(
    {
        "add.Scalar",
        "add_.Scalar",
        "sub.Scalar",
        "sub_.Scalar",
        "rsub.Scalar",
        "rsub.Tensor",
        "pow.Tensor_Scalar",
        "pow_.Scalar",
        "pow.Scalar",
        "clamp",
        "clamp_",
        "clamp_min",
        "clamp_min_",
        "clamp_max",
        "clamp_max_",
        "div.Scalar_mode",
        "div_.Scalar_mode",
        "floor_divide.Scalar",
        "floor_divide_.Scalar",
        "fmod.Scalar",
        "fmod_.Scalar",
        "remainder.Scalar",
        "remainder_.Scalar",
        "remainder.Scalar_Tensor",
        "eq.Scalar",
        "eq_.Scalar",
        "ne.Scalar",
        "ne_.Scalar",
        "lt.Scalar",
        "lt_.Scalar",
        "le.Scalar",
        "le_.Scalar",
        "gt.Scalar",
        "gt_.Scalar",
        "ge.Scalar",
        "ge_.Scalar",
        "bitwise_and.Scalar",
        "bitwise_and_.Scalar",
        "bitwise_or.Scalar",
        "bitwise_or_.Scalar",
        "bitwise_xor.Scalar",
        "bitwise_xor_.Scalar",
        "masked_fill.Scalar",
        "masked_fill_.Scalar",
        "xlogy.Scalar_Other",
        "xlogy.Scalar_Self",
    },
    pointwise());

const RegisterRule kSeveral(
    {
        "addcdiv",
        "addcdiv_",
        "addcmul",
        "addcmul_",
        "atan2",
        "atan2_",
        "pow.Tensor_Tensor",
        "pow_.Tensor",
        "clamp.Tensor",
        "clamp_.Tensor",
        "clamp_min.Tensor",
        "clamp_min_.Tensor",
        "clamp_max.Tensor",
        "clamp_max_.Tensor",
        "copysign.Tensor",
        "copysign_.Tensor",
        "div.Tensor_mode",
        "div_.Tensor_mode",
        "floor_divide",
        "floor_divide_.Tensor",
        "fmax",
        "fmin",
        "fmod.Tensor",
        "fmod_.Tensor",
        "hypot",
        "hypot_",
        "lerp.Tensor",
        "lerp_.Tensor",
        "maximum",
        "minimum",
        "remainder.Tensor",
        "remainder_.Tensor",
        "eq.Tensor",
        "eq_.Tensor",
        "ne.Tensor",
        "ne_.Tensor",
        "lt.Tensor",
        "lt_.Tensor",
        "le.Tensor",
        "le_.Tensor",
        "gt.Tensor",
        "gt_.Tensor",
        "ge.Tensor",
        "ge_.Tensor",
        "bitwise_and.Tensor",
        "bitwise_and_.Tensor",
        "bitwise_or.Tensor",
        "bitwise_or_.Tensor",
        "bitwise_xor.Tensor",
        "bitwise_xor_.Tensor",
        "logical_and",
        "logical_and_",
        "logical_or",
        "logical_or_",
        "logical_xor",
        "logical_xor_",
        "masked_fill.Tensor",
        "masked_fill_.Tensor",
        "where.self",
        "xlogy.Tensor",
        "xlogy_.Tensor",
    },
    pointwise());

// The result is written to a DTensor that must have its sizes.
const RegisterRule kOut({"add.out", "div.out", "maximum.out", "minimum.out", "mul.out", "sub.out"},
                        pointwise());

const RegisterRule kBackward({"elu_backward", "gelu_backward", "hardtanh_backward",
                              "hardswish_backward", "hardsigmoid_backward", "leaky_relu_backward",
                              "mish_backward", "sigmoid_backward", "silu_backward",
                              "softplus_backward", "tanh_backward", "threshold_backward"},
                             pointwise());

}  // namespace
}  // namespace ppfsdp::dtensor
