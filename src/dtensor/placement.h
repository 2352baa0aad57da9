#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ppfsdp::dtensor {

/// How a tensor is laid out along one dim of a DeviceMesh.
class Placement {
 public:
  enum class Kind : uint8_t { kReplicate, kShard, kStridedShard, kPartial };
  /// What turns the ranks' partial values into the whole. kNorm: (sum |x|^p)^(1/p).
  enum class PartialOp : uint8_t { kNone, kSum, kAvg, kMax, kMin, kNorm };

  static Placement replicate() { return Placement(); }
  /// Split on tensor dim `dim` as torch.chunk: ceil(n / w) each, trailing ranks short or empty.
  static Placement shard(int64_t dim);
  /// Split on `dim` where a mesh dim to the right has already split it into `split_factor` parts.
  static Placement strided_shard(int64_t dim, int64_t split_factor);
  /// Each rank holds a value of full shape to be reduced. `norm_order` is p of kNorm only.
  static Placement partial(PartialOp op = PartialOp::kSum, double norm_order = 2.0);

  Kind kind() const { return kind_; }
  bool is_replicate() const { return kind_ == Kind::kReplicate; }
  bool is_shard() const { return kind_ == Kind::kShard; }
  bool is_shard(int64_t dim) const { return kind_ == Kind::kShard && dim_ == dim; }
  bool is_strided_shard() const { return kind_ == Kind::kStridedShard; }
  bool is_partial() const { return kind_ == Kind::kPartial; }
  int64_t dim() const { return dim_; }
  int64_t split_factor() const { return split_factor_; }
  PartialOp partial_op() const { return partial_op_; }
  double norm_order() const { return norm_order_; }

  bool operator==(const Placement&) const = default;
  /// "Replicate()", "Shard(0)", "StridedShard(0, split_factor=2)", "Partial(sum)", "Partial(norm
  /// 2)".
  std::string str() const;

 private:
  Kind kind_ = Kind::kReplicate;
  PartialOp partial_op_ = PartialOp::kNone;
  int64_t dim_ = -1;
  int64_t split_factor_ = 1;
  double norm_order_ = 0;
};

/// One a mesh dim.
using Placements = std::vector<Placement>;

/// "[Shard(0), Replicate()]".
std::string to_string(const Placements& placements);

/// The part of a dim of `size` elements that shard `index` of `count` holds by the dim-0 rule.
struct ShardRange {
  int64_t offset = 0;  ///< first element; `size` of the whole when empty
  int64_t length = 0;
};
ShardRange shard_range(int64_t size, int64_t count, int64_t index);

}  // namespace ppfsdp::dtensor
