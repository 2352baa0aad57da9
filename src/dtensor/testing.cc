#include "src/dtensor/testing.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Formatting.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/nan_to_num.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>

#include <sstream>

#include "sim/mesh/world.h"

namespace ppfsdp::dtensor::testing {

void on_mesh(const std::vector<int64_t>& shape,
             const std::function<void(const mesh::DeviceMeshPtr& mesh)>& body) {
  int64_t world = 1;
  for (int64_t size : shape) {
    world *= size;
  }
  sim::run_world(static_cast<int>(world), {},
                 [&](comm::Runtime& runtime) { body(mesh::DeviceMesh::create(runtime, shape)); });
}

at::Tensor integers(c10::ArrayRef<int64_t> sizes, uint64_t seed, at::ScalarType dtype) {
  return at::randint(-4, 5, sizes, at::detail::createCPUGenerator(seed),
                     at::TensorOptions().dtype(at::kFloat))
      .to(dtype);
}

at::Tensor normals(c10::ArrayRef<int64_t> sizes, uint64_t seed) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed));
}

std::string difference(const at::Tensor& got, const at::Tensor& wanted) {
  std::ostringstream text;
  if (got.sizes() != wanted.sizes() || got.scalar_type() != wanted.scalar_type()) {
    text << "got " << got.sizes() << " of " << got.scalar_type() << ", wanted " << wanted.sizes()
         << " of " << wanted.scalar_type();
  } else if (!at::equal(at::isnan(got), at::isnan(wanted)) ||
             !at::equal(at::nan_to_num(got), at::nan_to_num(wanted))) {
    text << "got\n" << got << "\nwanted\n" << wanted;
  }
  return text.str();
}

}  // namespace ppfsdp::dtensor::testing
