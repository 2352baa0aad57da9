#include "src/comm/reduce_op.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

namespace ppfsdp::comm {

std::string to_string(const ReduceOp& op) {
  switch (op.kind) {
    case ReduceOp::Kind::kSum:
      return "sum";
    case ReduceOp::Kind::kAvg:
      return "avg";
    case ReduceOp::Kind::kPremulSum:
      return fmt::format("premul_sum({})", op.factor);
    case ReduceOp::Kind::kMin:
      return "min";
    case ReduceOp::Kind::kMax:
      return "max";
  }
  TORCH_INTERNAL_ASSERT(false, "unknown ReduceOp kind ", static_cast<int>(op.kind));
}

}  // namespace ppfsdp::comm
