#include "src/fsdp/testing/mlp.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <c10/core/GradMode.h>

#include "src/dtensor/dtensor.h"
#include "src/mesh/device_mesh.h"

namespace ppfsdp::fsdp::testing {

LayerImpl::LayerImpl(int64_t in, int64_t out) {
  register_parameter("w", w, at::empty({out, in}, at::kFloat));
  register_parameter("b", b, at::empty({out}, at::kFloat));
}

at::Tensor LayerImpl::forward(const at::Tensor& x) { return at::relu(at::linear(x, w, b)); }

MlpImpl::MlpImpl(const std::vector<int64_t>& widths) {
  for (size_t i = 0; i + 1 < widths.size(); ++i) {
    layers.push_back(register_module("layer" + std::to_string(i), Layer(widths[i], widths[i + 1])));
  }
  register_parameter("scale", scale, at::empty({widths.back()}, at::kFloat));
}

at::Tensor MlpImpl::forward(at::Tensor x) {
  for (Layer& layer : layers) {
    x = layer(x);
  }
  return x * scale;
}

Mlp make_mlp(const std::vector<int64_t>& widths, uint64_t seed) {
  Mlp model(widths);
  auto generator = at::detail::createCPUGenerator(seed);
  const c10::NoGradGuard no_grad;
  for (at::Tensor& parameter : model->parameters()) {
    parameter.normal_(0.1, 0.5, generator);
  }
  return model;
}

FSDPModule shard_mlp(Mlp& model, const FullyShardOptions& options) {
  for (Layer& layer : model->layers) {
    fully_shard(*layer, options);
  }
  return fully_shard(*model, options);
}

at::Tensor batch(int64_t width, int rank, int step, int micro) {
  auto generator = at::detail::createCPUGenerator(1000 + rank + 100 * step + 10000 * micro);
  return at::randn({4, width}, generator);
}

namespace {

at::Tensor loss_of(const at::Tensor& y) { return y.to(at::kFloat).pow(2).mean(); }

std::vector<int64_t> sizes_of_chunk(const at::Tensor& param, int world) {
  std::vector<int64_t> sizes = param.sizes().vec();
  sizes[0] = (sizes[0] + world - 1) / world;
  return sizes;
}

// The average over ranks of one group's gradients: pad each to whole chunks, lay part r of all side
// by side, reduce the flat buffers, and cut again.
std::vector<at::Tensor> average(const std::vector<std::vector<at::Tensor>>& grads_of_rank,
                                int world, comm::ReductionOrder order) {
  const size_t count = grads_of_rank[0].size();
  std::vector<at::Tensor> buffers;
  for (const auto& grads : grads_of_rank) {
    std::vector<at::Tensor> pieces;
    for (int part = 0; part < world; ++part) {
      for (const at::Tensor& grad : grads) {
        const int64_t chunk = c10::multiply_integers(sizes_of_chunk(grad, world));
        const at::Tensor padded =
            at::constant_pad_nd(grad.flatten(), {0, chunk * world - grad.numel()}, 0);
        pieces.push_back(padded.narrow(0, part * chunk, chunk));
      }
    }
    buffers.push_back(at::cat(pieces));
  }
  at::Tensor mean = at::empty_like(buffers[0]);
  if (world == 1) {
    mean.copy_(buffers[0]);
  } else {
    comm::reduce_range(order, comm::ReduceOp::avg(), buffers, 0, mean.numel(), mean);
  }
  const int64_t part = mean.numel() / world;
  std::vector<at::Tensor> result;
  int64_t offset = 0;
  for (size_t i = 0; i < count; ++i) {
    const at::Tensor& grad = grads_of_rank[0][i];
    const int64_t chunk = c10::multiply_integers(sizes_of_chunk(grad, world));
    const at::Tensor flat =
        mean.view({world, part}).narrow(1, offset, chunk).reshape({-1}).narrow(0, 0, grad.numel());
    result.push_back(flat.view(grad.sizes()));
    offset += chunk;
  }
  return result;
}

}  // namespace

std::vector<at::Tensor> train_reference(const MlpReference& config) {
  Mlp model = make_mlp(config.widths, config.seed);
  const std::vector<at::Tensor> params = model->parameters();
  const auto compute_dtype = config.policy.param_dtype.value_or(at::kFloat);
  for (int step = 0; step < config.steps; ++step) {
    std::vector<std::vector<at::Tensor>> grads_of_rank;
    for (int rank = 0; rank < config.world; ++rank) {
      // What a rank computes with: a copy in the compute dtype, whose gradients come in that dtype.
      Mlp copy(config.widths);
      std::vector<at::Tensor> leaves;
      {
        const c10::NoGradGuard no_grad;
        for (const at::Tensor& param : params) {
          at::Tensor leaf = param.detach().to(compute_dtype, false, /*copy=*/true);
          leaf.set_requires_grad(true);
          leaves.push_back(leaf);
        }
        size_t next = 0;
        copy->scale = leaves[next++];
        for (Layer& layer : copy->layers) {
          layer->w = leaves[next++];
          layer->b = leaves[next++];
        }
      }
      std::vector<at::Tensor> sums;
      for (int micro = 0; micro < config.microbatches; ++micro) {
        loss_of(copy(batch(config.widths[0], rank, step, micro).to(compute_dtype))).backward();
        const c10::NoGradGuard no_grad;
        for (size_t i = 0; i < leaves.size(); ++i) {
          const auto reduce_dtype = config.policy.reduce_dtype.value_or(compute_dtype);
          const at::Tensor grad = leaves[i].grad();
          if (grad.scalar_type() == reduce_dtype) {
            continue;  // autograd adds up
          }
          if (micro == 0) {
            sums.push_back(grad.to(reduce_dtype));
          } else {
            sums[i].add_(grad);
          }
          leaves[i].mutable_grad().reset();
        }
      }
      for (size_t i = sums.size(); i < leaves.size(); ++i) {
        sums.push_back(leaves[i].grad());
      }
      grads_of_rank.push_back(std::move(sums));
    }
    const c10::NoGradGuard no_grad;
    // parameters() lists the model's own scale first; groups are each layer's two, and the scale.
    for (size_t first = 0; first < params.size(); first += first == 0 ? 1 : 2) {
      const size_t count = first == 0 ? 1 : 2;
      std::vector<std::vector<at::Tensor>> group;
      for (const auto& grads : grads_of_rank) {
        group.emplace_back(grads.begin() + static_cast<int64_t>(first),
                           grads.begin() + static_cast<int64_t>(first + count));
      }
      const auto means = average(group, config.world, config.order);
      for (size_t i = 0; i < count; ++i) {
        params[first + i].add_(means[i].to(at::kFloat), -config.lr);
      }
    }
  }
  return params;
}

std::vector<at::Tensor> train_sharded(const MlpReference& config, comm::Runtime& runtime,
                                      ReshardAfterForward reshard) {
  const auto mesh = mesh::DeviceMesh::create(runtime, {runtime.world_size()});
  Mlp model = make_mlp(config.widths, config.seed);
  FSDPModule fsdp = shard_mlp(
      model, {.mesh = mesh, .reshard_after_forward = reshard, .mp_policy = config.policy});
  const std::vector<at::Tensor> params = model->parameters();
  for (int step = 0; step < config.steps; ++step) {
    for (int micro = 0; micro < config.microbatches; ++micro) {
      fsdp.set_requires_gradient_sync(micro == config.microbatches - 1);
      loss_of(model(batch(config.widths[0], runtime.rank(), step, micro))).backward();
    }
    const c10::NoGradGuard no_grad;
    for (at::Tensor param : params) {
      param.add_(param.grad(), -config.lr);
      param.mutable_grad().reset();
    }
  }
  std::vector<at::Tensor> result;
  const c10::NoGradGuard no_grad;
  for (const at::Tensor& param : params) {
    result.push_back(dtensor::full_tensor(param).clone());
  }
  return result;
}

}  // namespace ppfsdp::fsdp::testing
