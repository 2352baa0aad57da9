#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/TensorOptions.h>
#include <c10/util/ArrayRef.h>
#include <torch/nn/module.h>

#include "src/comm/runtime.h"

namespace ppfsdp::nn {

/// Gives every parameter and buffer of `module`, and with `recurse` of all modules below it, new
/// memory on `device` without values: what follows is reset_all_parameters, or a load of weights.
/// Nothing can tell in general that it did not follow; on the simulated mesh with poison the memory
/// under a model that holds DTensors is NaN.
///
/// Of a DTensor only this rank's part gets memory. The tensors stay the objects that they are, so
/// slots, ties, an optimizer made before and requires_grad stay as well, with sizes, strides, dtype
/// and placements. Gradients are dropped. `device` may be meta, which frees the memory.
void to_empty(torch::nn::Module& module, c10::Device device, bool recurse = true);

/// A tensor without values, its memory from `runtime` (NaN on a simulated mesh with poison), or
/// from LibTorch where that is null.
at::Tensor uninitialized(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                         const c10::TensorOptions& options, comm::Runtime* runtime);

/// Lets `tensor` go on as `data`, of the same kind (both DTensors, or neither), with its device,
/// dtype and memory: at::Tensor::set_data, which cannot leave the meta device.
void replace_data(const at::Tensor& tensor, const at::Tensor& data);

}  // namespace ppfsdp::nn
