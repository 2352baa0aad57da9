#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

#include "src/dtensor/placement.h"
#include "src/mesh/device_mesh.h"

namespace ppfsdp::dtensor {

/// The placement splits a tensor dim (Shard or StridedShard).
inline bool splits(const Placement& placement) {
  return placement.is_shard() || placement.is_strided_shard();
}
inline bool splits(const Placement& placement, int64_t dim) {
  return splits(placement) && placement.dim() == dim;
}

/// The mesh dims that split tensor dim `dim`, outermost split first: Shard from left to right, and
/// a StridedShard after the dims to its right whose sizes multiply to its split_factor. Throws when
/// a split_factor fits no such dims.
std::vector<int64_t> shard_order(const std::vector<int64_t>& mesh_shape,
                                 const Placements& placements, int64_t dim);

/// The placements with each StridedShard whose split_factor fits no mesh dims to its right any more
/// (another placement has changed) made a Shard.
Placements with_fitting_splits(const std::vector<int64_t>& mesh_shape, Placements placements);

/// The placements with negative dims counted from the end. Throws, naming `function`, when there is
/// not one placement a mesh dim, a dim is out of range, or a split_factor does not fit.
Placements checked_placements(const char* function, const mesh::DeviceMesh& mesh,
                              Placements placements, int64_t ndim);

/// For each tensor dim the range of the global tensor that the rank at `coordinates` holds. With
/// nested splits too this is one range.
std::vector<ShardRange> local_ranges(c10::ArrayRef<int64_t> global_sizes,
                                     const mesh::DeviceMesh& mesh, const Placements& placements,
                                     const std::vector<int64_t>& coordinates);

/// Sizes of the local part that the rank at `coordinates` of `mesh` holds.
std::vector<int64_t> local_sizes(c10::ArrayRef<int64_t> global_sizes, const mesh::DeviceMesh& mesh,
                                 const Placements& placements,
                                 const std::vector<int64_t>& coordinates);

/// The coordinates of the mesh's `index`-th rank, row-major.
std::vector<int64_t> coordinates_of(const std::vector<int64_t>& mesh_shape, int64_t index);

/// The strides of a tensor of `sizes` of which this is a part: its dims lie in memory in the part's
/// order and with the same gaps, as factors, between them; a stride of 0 (an expanded dim) stays 0.
/// So the whole is contiguous, or can be viewed, where the part is and can.
std::vector<int64_t> global_strides(c10::ArrayRef<int64_t> sizes,
                                    c10::ArrayRef<int64_t> local_sizes,
                                    c10::ArrayRef<int64_t> local_strides);

}  // namespace ppfsdp::dtensor
