// Ops that work along one dim, named by the argument `dim`, and take the other dims element by
// element: softmax, cumulative sums, gather and scatter.
#include "src/dtensor/rule.h"
#include "src/dtensor/sharding.h"

namespace ppfsdp::dtensor {
namespace {

/// A split of a dim that all operands have alike, other than `dim`, may stay. The result has the
/// sizes of operand `like`.
Rule along_dim(const char* like) {
  return {[like](const Call& call) {
    const int64_t ndim = call.ndim();
    const int64_t dim = wrap_dim(call, call.arg("dim").toInt(), ndim);
    const auto alike = [&](int64_t other) {
      for (const Operand& operand : call.operands()) {
        if (operand.spec->ndim() != ndim || operand.spec->sizes[other] != call.sizes()[other]) {
          return false;
        }
      }
      return true;
    };
    const std::vector<int64_t>& sizes = call.operands()[call.operands_of(like).front()].spec->sizes;
    return plan_by_strategies(call, {sizes}, [&](int64_t mesh_dim) {
      const size_t count = call.operands().size();
      std::vector<Strategy> strategies;
      for (const Operand& operand : call.operands()) {
        const Placement& now = operand.spec->placements[mesh_dim];
        if (splits(now) && now.dim() != dim && alike(now.dim())) {
          strategies.push_back({Placements(count, now), {now}});
        }
      }
      strategies.push_back({Placements(count, Placement::replicate()), {Placement::replicate()}});
      return strategies;
    });
  }};
}

const RegisterRule kLikeSelf({"_softmax", "_log_softmax", "cumsum", "cumsum_", "scatter.src",
                              "scatter.value", "scatter_.src", "scatter_.value", "scatter_add",
                              "scatter_add_"},
                             along_dim("self"));
const RegisterRule kLikeGradient({"_softmax_backward_data", "_log_softmax_backward_data"},
                                 along_dim("grad_output"));
const RegisterRule kLikeIndex({"gather"}, along_dim("index"));

}  // namespace
}  // namespace ppfsdp::dtensor
