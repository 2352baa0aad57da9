#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "src/comm/communicator.h"
#include "src/comm/runtime.h"

namespace ppfsdp::mesh {

class DeviceMesh;
using DeviceMeshPtr = std::shared_ptr<const DeviceMesh>;

/// Ranks laid out as an n-dimensional array, row-major, with a communicator for each dim.
///
/// A collective along dim d runs over the ranks that differ from this one in coordinate d only.
/// Immutable; made by every rank of the world together, in one order (`create` makes the groups,
/// which every rank of the world takes part in).
class DeviceMesh : public std::enable_shared_from_this<DeviceMesh> {
 public:
  /// A mesh over all ranks of `runtime` (which must outlive it): prod(shape) = world_size. Names,
  /// if given, are one a dim, distinct and not empty.
  static DeviceMeshPtr create(comm::Runtime& runtime, std::vector<int64_t> shape,
                              std::vector<std::string> dim_names = {});

  int64_t ndim() const { return static_cast<int64_t>(shape_.size()); }
  const std::vector<int64_t>& shape() const { return shape_; }
  /// Number of ranks along `dim`; negative dims count from the end.
  int64_t size(int64_t dim) const;
  /// Number of ranks of the whole mesh.
  int64_t size() const { return static_cast<int64_t>(ranks_.size()); }
  /// Empty when none were given.
  const std::vector<std::string>& dim_names() const { return dim_names_; }
  /// The dim called `name`; an error that lists the names otherwise.
  int64_t dim_of(const std::string& name) const;
  /// This rank's index along `dim`.
  int64_t coordinate(int64_t dim) const;
  const std::vector<int64_t>& coordinates() const { return coordinates_; }
  /// The mesh's ranks as ranks of the world, row-major.
  const std::vector<int>& ranks() const { return ranks_; }

  /// The group along `dim`; this rank's rank in it is coordinate(dim).
  comm::Communicator& communicator(int64_t dim) const;

  /// The group of `size` consecutive ranks along `dim` that this rank is in; `size` divides
  /// size(dim). Made by the first call (which every rank of the mesh makes alike), then shared, so
  /// that a model of many layers needs one communicator and not one a layer.
  const comm::CommunicatorPtr& block_communicator(int64_t dim, int64_t size) const;

  /// The mesh of this rank's ranks along the named dims, in the order given (which must be that of
  /// this mesh); shares the communicators. Its parent is this mesh.
  DeviceMeshPtr submesh(const std::vector<std::string>& dim_names) const;
  /// The mesh that this one is a submesh of; null for a mesh made by `create`.
  const DeviceMeshPtr& parent() const { return parent_; }

  comm::Runtime& runtime() const { return *runtime_; }

  /// Equal ranks, shape and names: two such meshes are interchangeable for DTensor.
  bool operator==(const DeviceMesh& other) const;

  /// "DeviceMesh(replicate=2, shard=4)" or "DeviceMesh(8)".
  std::string str() const;

 private:
  DeviceMesh() = default;

  comm::Runtime* runtime_ = nullptr;
  std::vector<int64_t> shape_;
  std::vector<std::string> dim_names_;
  std::vector<int64_t> coordinates_;
  std::vector<int> ranks_;
  std::vector<comm::CommunicatorPtr> communicators_;
  DeviceMeshPtr parent_;
  mutable std::map<std::pair<int64_t, int64_t>, comm::CommunicatorPtr> blocks_;
};

}  // namespace ppfsdp::mesh
