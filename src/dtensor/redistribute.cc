#include "src/dtensor/redistribute.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>

#include "src/comm/communicator.h"
#include "src/comm/runtime.h"
#include "src/dtensor/redistribute_plan.h"
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

/// One group of ranks and the local tensors' device stream. All that is done here is done there,
/// what tensors are made for it and what is communicated: so nothing has to be waited for, neither
/// before a buffer is read nor before it goes.
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

/// What leaves a value as it is under the sum. That is -0, since 0 + -0 = 0 would lose the sign of
/// a zero.
at::Tensor neutral_like(const at::Tensor& tensor, std::vector<int64_t> sizes) {
  at::Tensor result = at::zeros(sizes, tensor.options());
  // A number in tensor's clothing must not promote dtypes on some ranks only.
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    result.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return tensor.is_floating_point() ? result.fill_(-0.0) : result;
}

/// Replicate -> Partial without communication. For a sum or a norm the first rank keeps the value;
/// the average, the maximum and the minimum of equal values are that value.
at::Tensor to_partial(const at::Tensor& local, const Placement& partial, const Group& group) {
  const bool adds = partial.partial_op() == Placement::PartialOp::kSum || is_norm(partial);
  if (!adds || group.index == 0) {
    return local;
  }
  // A share of 0 in a sum of powers: an infinity, where the power is negative.
  return is_norm(partial) && partial.norm_order() < 0
             ? at::full_like(local, std::numeric_limits<double>::infinity())
             : neutral_like(local, local.sizes().vec());
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

/// Carries a plan out. Splits are kept as the mesh dims that split each tensor dim, outermost
/// first, so that StridedShard needs no case of its own.
class Redistribution {
 public:
  Redistribution(at::Tensor local, const mesh::DeviceMesh& mesh, c10::ArrayRef<int64_t> sizes,
                 const Placements& from)
      : local_(std::move(local)), mesh_(mesh), sizes_(sizes), now_(from) {
    for (size_t dim = 0; dim < sizes.size(); ++dim) {
      orders_.push_back(shard_order(mesh.shape(), from, static_cast<int64_t>(dim)));
      // Mesh dims of one rank take no part.
      std::erase_if(orders_.back(), [&](int64_t i) { return mesh.size(i) == 1; });
    }
  }

  void apply(const Transition& transition) {
    const int64_t i = transition.mesh_dim;
    const Placement& to = transition.to;
    const Group group(mesh_, i);
    const Placement from = now_[i];
    if (splits(from)) {
      if (to.is_shard()) {
        local_ = exchange(local_, from.dim(), size_before(from.dim()), to.dim(), group);
      } else if (to.is_partial()) {
        local_ = place(local_, from.dim(), size_before(from.dim()), group);
      } else {
        local_ = gather(local_, from.dim(), size_before(from.dim()), group);
      }
      orders_[from.dim()].pop_back();
    } else if (from.is_partial()) {
      local_ = to.is_shard() ? reduce_scatter(local_, to.dim(), from, group)
                             : all_reduce(local_, mesh_, i, from);
    } else if (to.is_shard()) {
      local_ = slice(local_, to.dim(), group);
      // A slice of what was received on the way would keep all of it alive.
      local_ = received_ ? own_copy(local_) : local_;
    } else {
      local_ = to_partial(local_, to, group);
    }
    received_ = received_ || !from.is_replicate();
    if (to.is_shard()) {
      orders_[to.dim()].push_back(i);
    }
    now_[i] = to;
  }

  at::Tensor result() && { return std::move(local_); }

 private:
  /// Size of tensor dim `dim` here before its innermost split.
  int64_t size_before(int64_t dim) const {
    int64_t size = sizes_[dim];
    const auto& order = orders_[dim];
    for (size_t k = 0; k + 1 < order.size(); ++k) {
      size = shard_range(size, mesh_.shape()[order[k]], mesh_.coordinate(order[k])).length;
    }
    return size;
  }

  at::Tensor local_;
  const mesh::DeviceMesh& mesh_;
  c10::ArrayRef<int64_t> sizes_;
  Placements now_;
  std::vector<std::vector<int64_t>> orders_;
  bool received_ = false;
};

void append(const Placements& placements, std::vector<int64_t>& words) {
  for (const Placement& placement : placements) {
    words.push_back(static_cast<int64_t>(placement.kind()) * 16 +
                    static_cast<int64_t>(placement.partial_op()));
    words.push_back(placement.dim());
    words.push_back(placement.split_factor());
    words.push_back(std::bit_cast<int64_t>(placement.norm_order()));
  }
}

/// The plan, worked out once a thread.
std::vector<Transition> transitions(const mesh::DeviceMesh& mesh, c10::ArrayRef<int64_t> sizes,
                                    int64_t element_size, const Placements& from,
                                    const Placements& to) {
  thread_local std::map<std::vector<int64_t>, std::vector<Transition>> plans;
  std::vector<int64_t> key = mesh.shape();
  key.push_back(element_size);
  append(from, key);
  append(to, key);
  key.insert(key.end(), sizes.begin(), sizes.end());
  const auto found = plans.find(key);
  if (found != plans.end()) {
    return found->second;
  }
  // Shapes that never come again must not pile up.
  constexpr size_t kMostPlans = 4096;
  if (plans.size() >= kMostPlans) {
    plans.clear();
  }
  return plans[std::move(key)] =
             plan_redistribution(mesh.shape(), sizes, element_size, from, to).transitions;
}

}  // namespace

void reduce_along(const at::Tensor& tensor, const mesh::DeviceMesh& mesh, int64_t mesh_dim,
                  const Placement& partial) {
  const Group group(mesh, mesh_dim);
  if (group.count == 1 || tensor.numel() == 0) {
    return;
  }
  at::Tensor buffer = tensor;
  if (tensor.scalar_type() == at::kBool) {
    buffer = tensor.to(at::kInt);
  } else if (tensor.scalar_type() == at::kHalf && is_norm(partial)) {
    // A half that holds a norm may not hold its power: beyond 256 its square is infinite.
    buffer = tensor.to(at::kFloat);
  }
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
  Redistribution redistribution(local, *mesh, sizes, from);
  const auto element_size = static_cast<int64_t>(local.element_size());
  for (const Transition& transition : transitions(*mesh, sizes, element_size, from, to)) {
    redistribution.apply(transition);
  }
  return std::move(redistribution).result();
}

}  // namespace ppfsdp::dtensor
