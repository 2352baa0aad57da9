#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "src/comm/runtime.h"
#include "src/dtensor/dtensor.h"

/// What the tests of DTensors share.
namespace ppfsdp::dtensor::testing {

inline const Placement kR = Placement::replicate();
inline const Placement kP = Placement::partial();
inline Placement S(int64_t dim) { return Placement::shard(dim); }

/// Runs `body` on every rank of a simulated mesh of that shape.
void on_mesh(const std::vector<int64_t>& shape,
             const std::function<void(const mesh::DeviceMeshPtr& mesh)>& body);

/// Small integers as `dtype`, different for each seed, the same on every rank. Sums of such numbers
/// are exact in any order.
at::Tensor integers(c10::ArrayRef<int64_t> sizes, uint64_t seed, at::ScalarType dtype = at::kFloat);
/// Numbers from a normal distribution.
at::Tensor normals(c10::ArrayRef<int64_t> sizes, uint64_t seed);

/// "" when the two are equal bit for bit (NaN equal to NaN, zeros by value), sizes and dtype
/// included; else what differs.
std::string difference(const at::Tensor& got, const at::Tensor& wanted);

}  // namespace ppfsdp::dtensor::testing
