#include "src/dtensor/redistribute.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "src/comm/communicator.h"
#include "src/comm/runtime.h"
#include "src/dtensor/sharding.h"

namespace ppfsdp::dtensor {
namespace {

comm::ReduceOp reduce_op(const Placement& partial) {
  switch (partial.partial_op()) {
    case Placement::PartialOp::kAvg:
      return comm::ReduceOp::avg();
    case Placement::PartialOp::kMax:
      return comm::ReduceOp::max();
    case Placement::PartialOp::kMin:
      return comm::ReduceOp::min();
    case Placement::PartialOp::kSum:
    case Placement::PartialOp::kNorm:
    case Placement::PartialOp::kNone:
      break;
  }
  return comm::ReduceOp::sum();
}

bool is_norm(const Placement& partial) {
  return partial.partial_op() == Placement::PartialOp::kNorm;
}

/// The same value in memory of its own, contiguous.
at::Tensor own_copy(const at::Tensor& tensor) {
  at::Tensor copy = at::empty(tensor.sizes(), tensor.options());
  copy.copy_(tensor);
  return copy;
}

int64_t numel_of(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

/// One group of ranks and the local tensors' device stream.
struct Group {
  Group(const mesh::DeviceMesh& mesh, int64_t mesh_dim)
      : communicator(mesh.communicator(mesh_dim)),
        stream(mesh.runtime().compute_stream()),
        count(mesh.size(mesh_dim)),
        index(mesh.coordinate(mesh_dim)) {}

  comm::Communicator& communicator;
  comm::Stream& stream;
  int64_t count;
  int64_t index;
};

at::Tensor slice(const at::Tensor& local, int64_t dim, const Group& group) {
  const ShardRange range = shard_range(local.size(dim), group.count, group.index);
  return local.narrow(dim, range.offset, range.length);
}

/// `size` is that of dim `dim` before this split.
at::Tensor gather(const at::Tensor& local, int64_t dim, int64_t size, const Group& group) {
  const int64_t chunk = shard_range(size, group.count, 0).length;
  const at::Tensor rows = local.movedim(dim, 0);
  std::vector<int64_t> shape = rows.sizes().vec();
  const int64_t length = shape[0];
  shape[0] = chunk * group.count;
  at::Tensor all = at::empty(shape, local.options());
  if (all.numel() > 0) {
    // The collective is in place: this rank's slot of the output is its input.
    const at::Tensor slot = all.narrow(0, chunk * group.index, chunk);
    slot.narrow(0, 0, length).copy_(rows);
    if (length < chunk) {
      slot.narrow(0, length, chunk - length).zero_();
    }
    group.communicator.all_gather_into(all, slot, group.stream);
  }
  // Only trailing shards are short, so all padding is at the end.
  return all.narrow(0, 0, size).movedim(0, dim).contiguous();
}

/// From a split of dim `from`, of size `from_size` before it, to a split of dim `to`.
at::Tensor exchange(const at::Tensor& local, int64_t from, int64_t from_size, int64_t to,
                    const Group& group) {
  std::vector<at::Tensor> parts;
  std::vector<int64_t> input_splits;
  for (int64_t rank = 0; rank < group.count; ++rank) {
    const ShardRange range = shard_range(local.size(to), group.count, rank);
    parts.push_back(local.narrow(to, range.offset, range.length).reshape({-1}));
    input_splits.push_back(parts.back().numel());
  }
  std::vector<int64_t> shape = local.sizes().vec();
  shape[to] = shard_range(local.size(to), group.count, group.index).length;
  std::vector<std::vector<int64_t>> shapes;
  std::vector<int64_t> output_splits;
  for (int64_t rank = 0; rank < group.count; ++rank) {
    shape[from] = shard_range(from_size, group.count, rank).length;
    shapes.push_back(shape);
    output_splits.push_back(numel_of(shape));
  }
  const int64_t received = std::accumulate(output_splits.begin(), output_splits.end(), int64_t{0});
  at::Tensor output = at::empty({received}, local.options());
  // A rank with nothing to send and receive takes part too, unless none in the group has anything.
  shape = local.sizes().vec();
  shape[from] = from_size;
  if (numel_of(shape) > 0) {
    group.communicator.all_to_all(output, at::cat(parts), output_splits, input_splits,
                                  group.stream);
  }
  parts.clear();
  int64_t offset = 0;
  for (int64_t rank = 0; rank < group.count; ++rank) {
    parts.push_back(output.narrow(0, offset, output_splits[rank]).view(shapes[rank]));
    offset += output_splits[rank];
  }
  return at::cat(parts, from);
}

at::Tensor reduce_scatter(const at::Tensor& local, int64_t dim, const Placement& partial,
                          const Group& group) {
  if (local.scalar_type() == at::kBool) {
    return reduce_scatter(local.to(at::kInt), dim, partial, group).to(at::kBool);
  }
  const at::Tensor rows = local.movedim(dim, 0);
  const ShardRange range = shard_range(rows.size(0), group.count, group.index);
  const int64_t chunk = shard_range(rows.size(0), group.count, 0).length;
  std::vector<int64_t> shape = rows.sizes().vec();
  shape[0] = chunk * group.count;
  // A copy in any case: the collective may overwrite its input.
  at::Tensor input = at::empty(shape, local.options());
  input.narrow(0, 0, rows.size(0)).copy_(rows);
  input.narrow(0, rows.size(0), shape[0] - rows.size(0)).zero_();
  shape[0] = chunk;
  at::Tensor output = at::empty(shape, local.options());
  if (output.numel() > 0) {
    if (is_norm(partial)) {
      input = at::pow(input, partial.norm_order());
    }
    group.communicator.reduce_scatter(output, input, reduce_op(partial), group.stream);
    if (is_norm(partial)) {
      output = at::pow(output, 1.0 / partial.norm_order());
    }
  }
  return output.narrow(0, 0, range.length).movedim(0, dim).contiguous();
}

at::Tensor all_reduce(const at::Tensor& local, const mesh::DeviceMesh& mesh, int64_t mesh_dim,
                      const Placement& partial) {
  at::Tensor result = own_copy(local);
  reduce_along(result, mesh, mesh_dim, partial);
  return result;
}

/// What leaves a value as it is under the reduction. For a sum that is -0, since 0 + -0 = 0 would
/// lose the sign of a zero.
at::Tensor neutral_like(const at::Tensor& tensor, std::vector<int64_t> sizes) {
  at::Tensor result = at::zeros(sizes, tensor.options());
  return tensor.is_floating_point() ? result.fill_(-0.0) : result;
}

/// Replicate -> Partial without communication. For a sum or a norm the first rank keeps the value;
/// the average, the maximum and the minimum of equal values are that value.
at::Tensor to_partial(const at::Tensor& local, const Placement& partial, const Group& group) {
  const bool adds = partial.partial_op() == Placement::PartialOp::kSum || is_norm(partial);
  return adds && group.index != 0 ? neutral_like(local, local.sizes().vec()) : local;
}

/// Shard -> Partial(sum) without communication: each rank's part in its place among neutral values.
at::Tensor place(const at::Tensor& local, int64_t dim, int64_t size, const Group& group) {
  std::vector<int64_t> sizes = local.sizes().vec();
  sizes[dim] = size;
  at::Tensor whole = neutral_like(local, sizes);
  const ShardRange range = shard_range(size, group.count, group.index);
  whole.narrow(dim, range.offset, range.length).copy_(local);
  return whole;
}

/// Placements with the order in which mesh dims split each tensor dim made plain, so that
/// StridedShard needs no case of its own.
struct Layout {
  Layout(const std::vector<int64_t>& mesh_shape, Placements from, int64_t ndim)
      : placements(std::move(from)) {
    for (int64_t dim = 0; dim < ndim; ++dim) {
      orders.push_back(shard_order(mesh_shape, placements, dim));
    }
    for (Placement& placement : placements) {
      placement = splits(placement) ? Placement::shard(placement.dim()) : placement;
    }
  }

  Placements placements;
  std::vector<std::vector<int64_t>> orders;
};

class Redistribution {
 public:
  Redistribution(at::Tensor local, const mesh::DeviceMesh& mesh, c10::ArrayRef<int64_t> sizes,
                 const Placements& from, const Placements& to)
      : local_(std::move(local)),
        mesh_(mesh),
        sizes_(sizes),
        now_(mesh.shape(), from, static_cast<int64_t>(sizes.size())),
        then_(mesh.shape(), to, static_cast<int64_t>(sizes.size())) {}

  at::Tensor run() {
    while (!done()) {
      // Cheapest first: what only cuts, then what shrinks as it reduces, then all-to-all; what
      // makes the local part larger comes last.
      TORCH_INTERNAL_ASSERT(step_replicate_to_shard() || step_partial_to_shard() ||
                                step_partial_to_replicate() || step_shard_to_shard() ||
                                step_undo_shard() || step_replicate_to_partial(),
                            "no transition leads from ", to_string(now_.placements), " to ",
                            to_string(then_.placements));
    }
    return local_;
  }

 private:
  int64_t ndim() const { return mesh_.ndim(); }

  /// Mesh dim `i` is as it shall be, its place in the order of splits included.
  bool settled(int64_t i) const {
    const Placement& placement = now_.placements[i];
    if (placement != then_.placements[i]) {
      return false;
    }
    if (!placement.is_shard()) {
      return true;
    }
    const auto& order = now_.orders[placement.dim()];
    const auto& wanted = then_.orders[placement.dim()];
    const auto end = std::find(order.begin(), order.end(), i) + 1;
    return std::distance(order.begin(), end) <= static_cast<std::ptrdiff_t>(wanted.size()) &&
           std::equal(order.begin(), end, wanted.begin());
  }

  bool done() const {
    for (int64_t i = 0; i < ndim(); ++i) {
      if (!settled(i)) {
        return false;
      }
    }
    return true;
  }

  /// Splitting along mesh dim `i` now would put it in its place in the order of splits.
  bool may_split(int64_t i) const {
    const Placement& wanted = then_.placements[i];
    if (!wanted.is_shard()) {
      return false;
    }
    const auto& order = now_.orders[wanted.dim()];
    const auto& target = then_.orders[wanted.dim()];
    return order.size() < target.size() && target[order.size()] == i &&
           std::equal(order.begin(), order.end(), target.begin());
  }

  bool innermost(int64_t i) const {
    const Placement& placement = now_.placements[i];
    return placement.is_shard() && now_.orders[placement.dim()].back() == i;
  }

  /// Size of tensor dim `dim` here before its innermost split.
  int64_t size_before(int64_t dim) const {
    int64_t size = sizes_[dim];
    const auto& order = now_.orders[dim];
    for (size_t k = 0; k + 1 < order.size(); ++k) {
      size = shard_range(size, mesh_.shape()[order[k]], mesh_.coordinate(order[k])).length;
    }
    return size;
  }

  void set(int64_t i, const Placement& placement, at::Tensor local) {
    if (now_.placements[i].is_shard()) {
      now_.orders[now_.placements[i].dim()].pop_back();
    }
    if (placement.is_shard()) {
      now_.orders[placement.dim()].push_back(i);
    }
    now_.placements[i] = placement;
    local_ = std::move(local);
  }

  bool alone(int64_t i) const { return mesh_.size(i) == 1; }

  bool step_replicate_to_shard() {
    for (int64_t i = 0; i < ndim(); ++i) {
      if (now_.placements[i].is_replicate() && may_split(i)) {
        set(i, then_.placements[i], slice(local_, then_.placements[i].dim(), Group(mesh_, i)));
        return true;
      }
    }
    return false;
  }

  bool step_partial_to_shard() {
    for (int64_t i = 0; i < ndim(); ++i) {
      const Placement& partial = now_.placements[i];
      if (partial.is_partial() && may_split(i)) {
        const Placement& target = then_.placements[i];
        set(i, target,
            alone(i) ? local_ : reduce_scatter(local_, target.dim(), partial, Group(mesh_, i)));
        return true;
      }
    }
    return false;
  }

  /// Also for another partial operation, which has to be finished first.
  bool step_partial_to_replicate() {
    for (int64_t i = ndim() - 1; i >= 0; --i) {
      const Placement& partial = now_.placements[i];
      if (partial.is_partial() && !settled(i) && !then_.placements[i].is_shard()) {
        set(i, Placement::replicate(), alone(i) ? local_ : all_reduce(local_, mesh_, i, partial));
        return true;
      }
    }
    return false;
  }

  bool step_shard_to_shard() {
    for (int64_t i = ndim() - 1; i >= 0; --i) {
      const Placement& source = now_.placements[i];
      if (innermost(i) && !settled(i) && may_split(i) &&
          source.dim() != then_.placements[i].dim()) {
        const int64_t from = source.dim();
        const int64_t to = then_.placements[i].dim();
        set(i, then_.placements[i],
            alone(i) ? local_ : exchange(local_, from, size_before(from), to, Group(mesh_, i)));
        return true;
      }
    }
    return false;
  }

  bool step_undo_shard() {
    for (int64_t i = ndim() - 1; i >= 0; --i) {
      if (!innermost(i) || settled(i)) {
        continue;
      }
      const int64_t dim = now_.placements[i].dim();
      const Placement& target = then_.placements[i];
      const bool sums = target.is_partial() && target.partial_op() == Placement::PartialOp::kSum;
      if (alone(i)) {
        set(i, Placement::replicate(), local_);
      } else if (sums) {
        set(i, target, place(local_, dim, size_before(dim), Group(mesh_, i)));
      } else {
        set(i, Placement::replicate(), gather(local_, dim, size_before(dim), Group(mesh_, i)));
      }
      return true;
    }
    return false;
  }

  bool step_replicate_to_partial() {
    for (int64_t i = 0; i < ndim(); ++i) {
      const Placement& target = then_.placements[i];
      if (now_.placements[i].is_replicate() && target.is_partial()) {
        set(i, target, to_partial(local_, target, Group(mesh_, i)));
        return true;
      }
    }
    return false;
  }

  at::Tensor local_;
  const mesh::DeviceMesh& mesh_;
  c10::ArrayRef<int64_t> sizes_;
  Layout now_;
  Layout then_;
};

}  // namespace

void reduce_along(const at::Tensor& tensor, const mesh::DeviceMesh& mesh, int64_t mesh_dim,
                  const Placement& partial) {
  const Group group(mesh, mesh_dim);
  if (group.count == 1 || tensor.numel() == 0) {
    return;
  }
  const bool is_bool = tensor.scalar_type() == at::kBool;
  at::Tensor buffer = is_bool ? tensor.to(at::kInt) : tensor;
  if (is_norm(partial)) {
    buffer = at::pow(buffer, partial.norm_order());
  }
  group.communicator.all_reduce(buffer, reduce_op(partial), group.stream);
  if (is_norm(partial)) {
    buffer = at::pow(buffer, 1.0 / partial.norm_order());
  }
  if (!buffer.is_same(tensor)) {
    tensor.copy_(buffer);
  }
}

at::Tensor redistribute_local(const at::Tensor& local, const mesh::DeviceMeshPtr& mesh,
                              c10::ArrayRef<int64_t> sizes, const Placements& from,
                              const Placements& to) {
  if (from == to) {
    return local;
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return Redistribution(local, *mesh, sizes, from, to).run();
}

}  // namespace ppfsdp::dtensor
