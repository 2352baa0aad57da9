#pragma once

#include <c10/core/ScalarType.h>
#include <nccl.h>

#include <array>
#include <cstddef>
#include <optional>

#include "src/comm/reduce_op.h"

namespace ppfsdp::nccl {

/// As what NCCL reduces tensors of a dtype; nothing for the dtypes that it cannot reduce, of which
/// comm::Communicator promises one, Short.
std::optional<ncclDataType_t> reduced_as(at::ScalarType dtype);

/// All but premul-sum, which is made for each use.
ncclRedOp_t builtin_op(comm::ReduceOp::Kind kind);

/// A factor as ncclRedOpCreatePreMulSum takes it: rounded to the tensor's dtype, which must be a
/// floating-point one.
struct Scalar {
  alignas(double) std::array<std::byte, sizeof(double)> bytes{};
};
Scalar scalar_of(double factor, at::ScalarType dtype);

}  // namespace ppfsdp::nccl
