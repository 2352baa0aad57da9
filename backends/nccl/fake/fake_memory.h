#pragma once

#include <c10/core/Allocator.h>

namespace ppfsdp::nccl::testing {

class FakeStream;

/// From the first call on, tensors on the host that a thread of a fake device makes belong to its
/// current stream; others are as before. For the whole process.
void own_tensor_memory();

/// The memory is in use until the stream has done what is queued there when it is freed.
void use_on_stream(const c10::DataPtr& memory, FakeStream& stream);

/// Whether LibTorch's operations wait for the calling thread's current stream, if it has one.
void observe_operations(bool observe);

}  // namespace ppfsdp::nccl::testing
