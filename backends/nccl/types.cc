#include "backends/nccl/types.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <cstring>

namespace ppfsdp::nccl {
namespace {

template <typename T>
Scalar stored(double factor) {
  const T value = static_cast<T>(factor);
  Scalar scalar;
  static_assert(sizeof(value) <= sizeof(scalar.bytes));
  std::memcpy(scalar.bytes.data(), &value, sizeof(value));
  return scalar;
}

}  // namespace

std::optional<ncclDataType_t> reduced_as(at::ScalarType dtype) {
  switch (dtype) {
    case at::kByte:
      return ncclUint8;
    case at::kChar:
      return ncclInt8;
    case at::kInt:
      return ncclInt32;
    case at::kLong:
      return ncclInt64;
    case at::kHalf:
      return ncclFloat16;
    case at::kBFloat16:
      return ncclBfloat16;
    case at::kFloat:
      return ncclFloat32;
    case at::kDouble:
      return ncclFloat64;
    default:
      return std::nullopt;
  }
}

ncclRedOp_t builtin_op(comm::ReduceOp::Kind kind) {
  switch (kind) {
    case comm::ReduceOp::Kind::kSum:
      return ncclSum;
    case comm::ReduceOp::Kind::kAvg:
      return ncclAvg;
    case comm::ReduceOp::Kind::kMin:
      return ncclMin;
    case comm::ReduceOp::Kind::kMax:
      return ncclMax;
    case comm::ReduceOp::Kind::kPremulSum:
      break;
  }
  TORCH_INTERNAL_ASSERT(false, "premul_sum is no builtin of NCCL");
}

Scalar scalar_of(double factor, at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return stored<c10::Half>(factor);
    case at::kBFloat16:
      return stored<c10::BFloat16>(factor);
    case at::kFloat:
      return stored<float>(factor);
    case at::kDouble:
      return stored<double>(factor);
    default:
      TORCH_INTERNAL_ASSERT(false, "premul_sum of ", dtype);
  }
}

}  // namespace ppfsdp::nccl
