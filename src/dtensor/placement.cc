#include "src/dtensor/placement.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>

#include "fmt/format.h"

namespace ppfsdp::dtensor {

Placement Placement::shard(int64_t dim) {
  Placement placement;
  placement.kind_ = Kind::kShard;
  placement.dim_ = dim;
  return placement;
}

Placement Placement::strided_shard(int64_t dim, int64_t split_factor) {
  TORCH_CHECK(split_factor >= 1, "Placement::strided_shard: split_factor must be at least 1, got ",
              split_factor);
  Placement placement;
  placement.kind_ = Kind::kStridedShard;
  placement.dim_ = dim;
  placement.split_factor_ = split_factor;
  return placement;
}

Placement Placement::partial(PartialOp op, double norm_order) {
  TORCH_CHECK(op != PartialOp::kNone, "Placement::partial: an operation is needed, got none");
  Placement placement;
  placement.kind_ = Kind::kPartial;
  placement.partial_op_ = op;
  if (op == PartialOp::kNorm) {
    TORCH_CHECK(std::isfinite(norm_order) && norm_order != 0,
                "Placement::partial: the order of a norm must be finite and not 0 (the norms of "
                "order inf, -inf and 0 are Partial(max), Partial(min) and Partial(sum)), got ",
                norm_order);
    placement.norm_order_ = norm_order;
  }
  return placement;
}

std::string Placement::str() const {
  switch (kind_) {
    case Kind::kReplicate:
      return "Replicate()";
    case Kind::kShard:
      return fmt::format("Shard({})", dim_);
    case Kind::kStridedShard:
      return fmt::format("StridedShard({}, split_factor={})", dim_, split_factor_);
    case Kind::kPartial:
      break;
  }
  switch (partial_op_) {
    case PartialOp::kAvg:
      return "Partial(avg)";
    case PartialOp::kMax:
      return "Partial(max)";
    case PartialOp::kMin:
      return "Partial(min)";
    case PartialOp::kNorm:
      return fmt::format("Partial(norm {})", norm_order_);
    case PartialOp::kSum:
    case PartialOp::kNone:
      break;
  }
  return "Partial(sum)";
}

std::string to_string(const Placements& placements) {
  std::string text = "[";
  for (size_t i = 0; i < placements.size(); ++i) {
    text += (i == 0 ? "" : ", ") + placements[i].str();
  }
  return text + "]";
}

ShardRange shard_range(int64_t size, int64_t count, int64_t index) {
  const int64_t chunk = (size + count - 1) / count;
  const int64_t offset = std::min(size, chunk * index);
  return {offset, std::min(chunk, size - offset)};
}

}  // namespace ppfsdp::dtensor
