#include "src/mesh/device_mesh.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

namespace ppfsdp::mesh {
namespace {

int64_t checked_dim(int64_t dim, int64_t ndim) {
  TORCH_CHECK(dim >= -ndim && dim < ndim, "DeviceMesh: dim ", dim, " does not exist; a mesh of ",
              ndim, " dim(s) has dims 0 to ", ndim - 1);
  return dim < 0 ? dim + ndim : dim;
}

}  // namespace

DeviceMeshPtr DeviceMesh::create(comm::Runtime& runtime, std::vector<int64_t> shape,
                                 std::vector<std::string> dim_names) {
  const int64_t ndim = static_cast<int64_t>(shape.size());
  TORCH_CHECK(ndim > 0, "DeviceMesh: the shape has no dims; give at least one, such as {",
              runtime.world_size(), "}");
  int64_t product = 1;
  for (const int64_t size : shape) {
    TORCH_CHECK(size > 0, "DeviceMesh: sizes must be positive, got shape ",
                fmt::format("{}", shape));
    product *= size;
    TORCH_CHECK(product <= runtime.world_size(), "DeviceMesh: shape ", fmt::format("{}", shape),
                " has more ranks than the world's ", runtime.world_size());
  }
  TORCH_CHECK(product == runtime.world_size(), "DeviceMesh: shape ", fmt::format("{}", shape),
              " has ", product, " ranks, the world has ", runtime.world_size(),
              "; the product must be the world's size");
  if (!dim_names.empty()) {
    TORCH_CHECK(static_cast<int64_t>(dim_names.size()) == ndim, "DeviceMesh: ", dim_names.size(),
                " dim names for ", ndim, " dims; give one a dim or none");
    for (size_t i = 0; i < dim_names.size(); ++i) {
      TORCH_CHECK(!dim_names[i].empty(), "DeviceMesh: the name of dim ", i, " is empty");
      const auto same = std::find(dim_names.begin(), dim_names.begin() + i, dim_names[i]);
      TORCH_CHECK(same == dim_names.begin() + i, "DeviceMesh: two dims are called '", dim_names[i],
                  "'; names must differ");
    }
  }

  std::shared_ptr<DeviceMesh> mesh(new DeviceMesh());
  mesh->runtime_ = &runtime;
  mesh->shape_ = std::move(shape);
  mesh->dim_names_ = std::move(dim_names);
  mesh->ranks_.resize(product);
  std::iota(mesh->ranks_.begin(), mesh->ranks_.end(), 0);
  mesh->coordinates_.resize(ndim);
  int64_t rest = runtime.rank();
  for (int64_t dim = ndim - 1; dim >= 0; --dim) {
    mesh->coordinates_[dim] = rest % mesh->shape_[dim];
    rest /= mesh->shape_[dim];
  }
  if (ndim == 1) {
    mesh->communicators_ = {runtime.world()};
    return mesh;
  }
  int64_t stride = product;
  for (int64_t dim = 0; dim < ndim; ++dim) {
    stride /= mesh->shape_[dim];
    const int64_t first = runtime.rank() - mesh->coordinates_[dim] * stride;
    std::vector<int> members(mesh->shape_[dim]);
    for (int64_t i = 0; i < mesh->shape_[dim]; ++i) {
      members[i] = static_cast<int>(first + i * stride);
    }
    const std::string name =
        mesh->dim_names_.empty() ? fmt::format("mesh_dim{}", dim) : mesh->dim_names_[dim];
    mesh->communicators_.push_back(runtime.world()->subgroup(members, name));
  }
  return mesh;
}

int64_t DeviceMesh::size(int64_t dim) const { return shape_[checked_dim(dim, ndim())]; }

int64_t DeviceMesh::coordinate(int64_t dim) const { return coordinates_[checked_dim(dim, ndim())]; }

comm::Communicator& DeviceMesh::communicator(int64_t dim) const {
  return *communicators_[checked_dim(dim, ndim())];
}

const comm::CommunicatorPtr& DeviceMesh::block_communicator(int64_t dim, int64_t size) const {
  dim = checked_dim(dim, ndim());
  TORCH_CHECK(size > 0 && shape_[dim] % size == 0, "DeviceMesh: blocks of ", size,
              " ranks do not divide dim ", dim, " of ", str());
  comm::CommunicatorPtr& block = blocks_[{dim, size}];
  if (block == nullptr) {
    const int first = static_cast<int>(coordinates_[dim] / size * size);
    std::vector<int> members(size);
    std::iota(members.begin(), members.end(), first);
    block = communicators_[dim]->subgroup(members,
                                          fmt::format("{}/{}", communicators_[dim]->name(), size));
  }
  return block;
}

int64_t DeviceMesh::dim_of(const std::string& name) const {
  const auto found = std::find(dim_names_.begin(), dim_names_.end(), name);
  TORCH_CHECK(found != dim_names_.end(), "DeviceMesh: no dim is called '", name, "'; ",
              dim_names_.empty() ? "this mesh has no names"
                                 : fmt::format("the names are {}", fmt::join(dim_names_, ", ")));
  return found - dim_names_.begin();
}

DeviceMeshPtr DeviceMesh::submesh(const std::vector<std::string>& dim_names) const {
  TORCH_CHECK(!dim_names.empty(), "DeviceMesh: submesh needs at least one dim name");
  std::shared_ptr<DeviceMesh> sub(new DeviceMesh());
  sub->runtime_ = runtime_;
  sub->parent_ = shared_from_this();
  sub->dim_names_ = dim_names;
  std::vector<int64_t> strides(ndim(), 1);
  for (int64_t dim = ndim() - 2; dim >= 0; --dim) {
    strides[dim] = strides[dim + 1] * shape_[dim + 1];
  }
  // Start at this rank with the kept coordinates set to zero, then walk the kept dims row-major.
  int64_t first = 0;
  for (int64_t dim = 0; dim < ndim(); ++dim) {
    first += coordinates_[dim] * strides[dim];
  }
  std::vector<int64_t> offsets = {0};
  int64_t previous = -1;
  for (const std::string& name : dim_names) {
    const int64_t dim = dim_of(name);
    TORCH_CHECK(dim > previous, "DeviceMesh: submesh dims must be in this mesh's order, ", str(),
                "; got ", fmt::format("{}", fmt::join(dim_names, ", ")));
    previous = dim;
    first -= coordinates_[dim] * strides[dim];
    sub->shape_.push_back(shape_[dim]);
    sub->coordinates_.push_back(coordinates_[dim]);
    sub->communicators_.push_back(communicators_[dim]);
    std::vector<int64_t> next;
    next.reserve(offsets.size() * shape_[dim]);
    for (const int64_t offset : offsets) {
      for (int64_t i = 0; i < shape_[dim]; ++i) {
        next.push_back(offset + i * strides[dim]);
      }
    }
    offsets = std::move(next);
  }
  for (const int64_t offset : offsets) {
    sub->ranks_.push_back(ranks_[first + offset]);
  }
  return sub;
}

bool DeviceMesh::operator==(const DeviceMesh& other) const {
  return this == &other || (runtime_ == other.runtime_ && shape_ == other.shape_ &&
                            dim_names_ == other.dim_names_ && ranks_ == other.ranks_);
}

std::string DeviceMesh::str() const {
  std::vector<std::string> dims;
  for (int64_t dim = 0; dim < ndim(); ++dim) {
    dims.push_back(dim_names_.empty() ? fmt::format("{}", shape_[dim])
                                      : fmt::format("{}={}", dim_names_[dim], shape_[dim]));
  }
  return fmt::format("DeviceMesh({})", fmt::join(dims, ", "));
}

}  // namespace ppfsdp::mesh
