#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "src/dtensor/placement.h"
#include "src/mesh/device_mesh.h"

namespace ppfsdp::dtensor {

/// What a DTensor is beside its local part. Interned per mesh: equal specs are one object.
struct Spec {
  mesh::DeviceMeshPtr mesh;
  Placements placements;
  std::vector<int64_t> sizes;    ///< global
  std::vector<int64_t> strides;  ///< global, in elements
  c10::ScalarType dtype;
  std::vector<int64_t> local_sizes;  ///< of this rank's part
  uint64_t id;  ///< the same for equal specs of one mesh, now and later; never used for another

  int64_t ndim() const { return static_cast<int64_t>(sizes.size()); }
  /// "[4, 3], Float, DeviceMesh(2), [Shard(0)]".
  std::string str() const;
};
using SpecPtr = std::shared_ptr<const Spec>;

/// The one Spec of these values. Placements must be as checked_placements leaves them.
SpecPtr make_spec(const mesh::DeviceMeshPtr& mesh, const Placements& placements,
                  c10::ArrayRef<int64_t> sizes, c10::ArrayRef<int64_t> strides,
                  c10::ScalarType dtype);

/// `spec` with other placements.
SpecPtr with_placements(const Spec& spec, const Placements& placements);

/// One object, or two that have the same ranks, shape and names.
bool same_mesh(const mesh::DeviceMeshPtr& a, const mesh::DeviceMeshPtr& b);

}  // namespace ppfsdp::dtensor
