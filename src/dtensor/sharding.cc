#include "src/dtensor/sharding.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <optional>

namespace ppfsdp::dtensor {

namespace {

/// How many of the splits in `order` (mesh dims, outermost first) multiply to `split_factor`; none
/// if no number of them does.
std::optional<std::ptrdiff_t> position_of(const std::vector<int64_t>& mesh_shape,
                                          const std::vector<int64_t>& order, int64_t split_factor) {
  size_t position = 0;
  int64_t product = 1;
  while (product < split_factor && position < order.size()) {
    product *= mesh_shape[order[position++]];
  }
  return product == split_factor ? std::optional(static_cast<std::ptrdiff_t>(position))
                                 : std::nullopt;
}

}  // namespace

std::vector<int64_t> shard_order(const std::vector<int64_t>& mesh_shape,
                                 const Placements& placements, int64_t dim) {
  std::vector<int64_t> order;
  for (int64_t i = static_cast<int64_t>(placements.size()) - 1; i >= 0; --i) {
    const Placement& placement = placements[i];
    if (!splits(placement, dim)) {
      continue;
    }
    const auto position = position_of(mesh_shape, order, placement.split_factor());
    TORCH_CHECK(position, "the split_factor of ", placement.str(), " on mesh dim ", i,
                " must be the number of parts into which the mesh dims to its "
                "right split the dim first; placements: ",
                to_string(placements), ", mesh shape: ", c10::IntArrayRef(mesh_shape));
    order.insert(order.begin() + *position, i);
  }
  return order;
}

Placements with_fitting_splits(const std::vector<int64_t>& mesh_shape, Placements placements) {
  for (int64_t i = static_cast<int64_t>(placements.size()) - 1; i >= 0; --i) {
    Placement& placement = placements[i];
    if (!placement.is_strided_shard()) {
      continue;
    }
    Placements right(placements.begin() + i + 1, placements.end());
    right.insert(right.begin(), i + 1, Placement::replicate());
    if (!position_of(mesh_shape, shard_order(mesh_shape, right, placement.dim()),
                     placement.split_factor())) {
      placement = Placement::shard(placement.dim());
    }
  }
  return placements;
}

Placements checked_placements(const char* function, const mesh::DeviceMesh& mesh,
                              Placements placements, int64_t ndim) {
  TORCH_CHECK(static_cast<int64_t>(placements.size()) == mesh.ndim(), function, ": ", mesh.str(),
              " needs one placement for each of its ", mesh.ndim(), " dims, got ",
              to_string(placements));
  for (Placement& placement : placements) {
    if (!splits(placement)) {
      continue;
    }
    const int64_t dim = placement.dim() < 0 ? placement.dim() + ndim : placement.dim();
    TORCH_CHECK(dim >= 0 && dim < ndim, function, ": ", placement.str(),
                " is out of range for a tensor of ", ndim, " dims");
    placement = placement.is_shard() ? Placement::shard(dim)
                                     : Placement::strided_shard(dim, placement.split_factor());
  }
  for (int64_t dim = 0; dim < ndim; ++dim) {
    shard_order(mesh.shape(), placements, dim);
  }
  return placements;
}

std::vector<ShardRange> local_ranges(c10::ArrayRef<int64_t> global_sizes,
                                     const mesh::DeviceMesh& mesh, const Placements& placements,
                                     const std::vector<int64_t>& coordinates) {
  std::vector<ShardRange> ranges;
  ranges.reserve(global_sizes.size());
  for (size_t dim = 0; dim < global_sizes.size(); ++dim) {
    ShardRange range{0, global_sizes[dim]};
    for (int64_t i : shard_order(mesh.shape(), placements, static_cast<int64_t>(dim))) {
      const ShardRange inner = shard_range(range.length, mesh.shape()[i], coordinates[i]);
      range = {range.offset + inner.offset, inner.length};
    }
    ranges.push_back(range);
  }
  return ranges;
}

std::vector<int64_t> local_sizes(c10::ArrayRef<int64_t> global_sizes, const mesh::DeviceMesh& mesh,
                                 const Placements& placements,
                                 const std::vector<int64_t>& coordinates) {
  std::vector<int64_t> sizes;
  sizes.reserve(global_sizes.size());
  for (const ShardRange& range : local_ranges(global_sizes, mesh, placements, coordinates)) {
    sizes.push_back(range.length);
  }
  return sizes;
}

std::vector<int64_t> coordinates_of(const std::vector<int64_t>& mesh_shape, int64_t index) {
  std::vector<int64_t> coordinates(mesh_shape.size());
  for (size_t i = mesh_shape.size(); i-- > 0;) {
    coordinates[i] = index % mesh_shape[i];
    index /= mesh_shape[i];
  }
  return coordinates;
}

std::vector<int64_t> global_strides(c10::ArrayRef<int64_t> sizes,
                                    c10::ArrayRef<int64_t> local_sizes,
                                    c10::ArrayRef<int64_t> local_strides) {
  if (sizes == local_sizes) {
    return local_strides.vec();
  }
  std::vector<int64_t> order(sizes.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return local_strides[a] > local_strides[b]; });
  std::vector<int64_t> strides(sizes.size());
  int64_t dense = 1;        // the next dim's stride if it leaves no gap
  int64_t local_dense = 1;  // the same in the part
  for (size_t k = order.size(); k-- > 0;) {
    const int64_t dim = order[k];
    const int64_t local = local_strides[dim];
    if (local == 0 && sizes[dim] > 1) {
      strides[dim] = 0;
      continue;
    }
    if (local > local_dense) {
      strides[dim] = (dense * local + local_dense - 1) / local_dense;
      local_dense = local;
    } else if (local < local_dense && local_sizes[dim] > 1) {
      // Dims that interleave, of every second column say: (2, 2) of strides (3, 2).
      strides[dim] = std::max<int64_t>(1, dense * local / local_dense);
      local_dense = local;
    } else {
      strides[dim] = dense;
    }
    dense = strides[dim] * std::max<int64_t>(sizes[dim], 1);
    local_dense *= std::max<int64_t>(local_sizes[dim], 1);
  }
  return strides;
}

}  // namespace ppfsdp::dtensor
