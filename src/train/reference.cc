#include "src/train/reference.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/max.h>
#include <ATen/ops/norm.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "src/comm/reduce_op.h"
#include "src/optim/total_norm.h"

namespace ppfsdp::train {
namespace {

/// Rows of dim 0 that a rank holds at most: ceil(rows / world).
int64_t chunk_rows(const at::Tensor& tensor, int world) {
  return (tensor.size(0) + world - 1) / world;
}

/// [world, chunk elements]: `grad` cut into equal shards, the missing rows zero.
at::Tensor padded_shards(const at::Tensor& grad, int world, at::ScalarType dtype) {
  std::vector<int64_t> sizes = grad.sizes().vec();
  sizes[0] = world * chunk_rows(grad, world);
  const at::Tensor padded = at::zeros(sizes, grad.options().dtype(dtype));
  padded.narrow(0, 0, grad.size(0)).copy_(grad);
  return padded.view({world, -1});
}

/// The rows of `tensor` that `rank` holds.
at::Tensor shard_of(const at::Tensor& tensor, int world, int rank) {
  const int64_t rows = chunk_rows(tensor, world);
  const int64_t begin = std::min(tensor.size(0), rank * rows);
  return tensor.narrow(0, begin, std::min(rows, tensor.size(0) - begin));
}

/// What every rank has after the inputs, one a rank, are reduced.
at::Tensor fold(comm::ReductionOrder order, const comm::ReduceOp& op,
                const std::vector<at::Tensor>& inputs) {
  const at::Tensor output = at::empty_like(inputs[0]);
  comm::reduce_range(order, op, inputs, 0, output.numel(), output);
  return output;
}

/// The mean over ranks, as fully_shard takes it. float16 would overflow in the sum: about
/// sqrt(world) is divided out before it, the rest after.
at::Tensor mean_of_ranks(comm::ReductionOrder order, const std::vector<at::Tensor>& inputs) {
  if (inputs[0].scalar_type() != at::kHalf) return fold(order, comm::ReduceOp::avg(), inputs);
  const auto world = static_cast<int64_t>(inputs.size());
  int64_t before = 1;
  while (world % before == 0 && before * before < world) before *= 2;
  for (const at::Tensor& input : inputs) input.div_(static_cast<double>(before));
  return fold(order, comm::ReduceOp::sum(), inputs)
      .div_(static_cast<double>(world) / static_cast<double>(before));
}

/// Floating-point tensors in param_dtype, as fully_shard casts a module's inputs.
nn::Module::ForwardPreHook cast_inputs_to(at::ScalarType dtype) {
  return [dtype](nn::Module&, const nn::Module::TensorRefs& inputs) {
    for (at::Tensor* input : inputs) {
      if (input->is_floating_point()) *input = input->to(dtype);
    }
  };
}

}  // namespace

ReferenceTrainer::ReferenceTrainer(const std::vector<nn::Module*>& groups,
                                   const ReferenceOptions& options)
    : options_(options) {
  TORCH_CHECK(options.world > 0, "ReferenceTrainer: world is ", options.world,
              ", must be positive");
  TORCH_CHECK(!groups.empty(), "ReferenceTrainer: there must be a module");
  // As fully_shard: a reduce_dtype that compute has anyway counts as unset.
  if (options_.reduce_dtype == options_.param_dtype) options_.reduce_dtype.reset();
  std::map<const c10::TensorImpl*, size_t> index_of;
  const auto index = [&](const std::string& name, const at::Tensor& parameter) {
    const auto [found, fresh] =
        index_of.try_emplace(parameter.unsafeGetTensorImpl(), parameters_.size());
    if (fresh) parameters_.push_back({.name = name, .master = parameter});
    return found->second;
  };
  // In the root's order, which is the optimizer's.
  nn::Module& root = *groups.back();
  for (const auto& item : root.named_parameters()) index(item.key(), item.value());
  const size_t count = parameters_.size();
  for (const auto& module : root.named_modules()) {
    auto* owner = dynamic_cast<nn::Module*>(module.value().get());
    for (const auto& item : module.value()->named_parameters(/*recurse=*/false)) {
      const std::string name = module.key().empty() ? item.key() : module.key() + "." + item.key();
      at::Tensor* slot = owner == nullptr ? nullptr : owner->slot(item.key());
      TORCH_CHECK(slot != nullptr, "ReferenceTrainer: parameter '", name,
                  "' has no slot; register it with nn::Module::register_parameter");
      std::vector<at::Tensor*>& slots = parameters_[index(name, item.value())].slots;
      if (std::ranges::find(slots, slot) == slots.end()) slots.push_back(slot);
    }
  }
  std::vector<char> taken(count, 0);
  for (nn::Module* module : groups) {
    Group group;
    for (const at::Tensor& parameter : module->parameters()) {
      const size_t i = index("", parameter);
      TORCH_CHECK(i < count, "ReferenceTrainer: a module is not part of the last one, the root");
      if (!std::exchange(taken[i], 1)) group.push_back(i);
    }
    groups_.push_back(std::move(group));
    if (options_.param_dtype) {
      module->register_forward_pre_hook(cast_inputs_to(*options_.param_dtype));
    }
  }
}

std::vector<at::Tensor> ReferenceTrainer::parameters() const {
  std::vector<at::Tensor> result;
  for (const Parameter& parameter : parameters_) {
    if (parameter.master.requires_grad()) result.push_back(parameter.master);
  }
  return result;
}

// A rank's gradients must not fall into the masters', so forward reads other leaves: aliases of the
// masters, or copies in param_dtype.
void ReferenceTrainer::begin_computation() {
  at::NoGradGuard no_grad;
  for (Parameter& parameter : parameters_) {
    const at::ScalarType dtype = options_.param_dtype.value_or(parameter.master.scalar_type());
    parameter.compute = parameter.master.detach().to(dtype);
    parameter.compute.set_requires_grad(parameter.master.requires_grad());
    for (at::Tensor* slot : parameter.slots) *slot = parameter.compute;
    parameter.by_rank.clear();
  }
}

void ReferenceTrainer::end_computation() {
  for (Parameter& parameter : parameters_) {
    for (at::Tensor* slot : parameter.slots) *slot = parameter.master;
    parameter.compute.reset();
  }
}

// Without synchronisation fully_shard adds up in reduce_dtype where that is set; otherwise autograd
// adds to the gradient that is there.
void ReferenceTrainer::keep_gradient(Parameter& parameter) const {
  at::Tensor& grad = parameter.compute.mutable_grad();
  if (!grad.defined()) return;
  const at::ScalarType dtype = options_.reduce_dtype.value_or(grad.scalar_type());
  if (parameter.accumulated.defined()) {
    parameter.accumulated.add_(grad);
  } else if (dtype != grad.scalar_type()) {
    parameter.accumulated = grad.to(dtype);
  } else {
    return;
  }
  grad.reset();
}

std::vector<std::vector<double>> ReferenceTrainer::backward(int microbatches, const Loss& loss) {
  TORCH_CHECK(microbatches > 0, "ReferenceTrainer: microbatches is ", microbatches,
              ", must be positive");
  std::vector<std::vector<double>> losses(options_.world);
  const auto run = [&](int rank, int microbatch) {
    const at::Tensor value = loss(rank, microbatch);
    value.backward();
    losses[rank].push_back(value.item<double>());
  };
  if (plain()) {
    for (int microbatch = 0; microbatch < microbatches; ++microbatch) run(0, microbatch);
    return losses;
  }
  begin_computation();
  for (int rank = 0; rank < options_.world; ++rank) {
    for (int microbatch = 0; microbatch < microbatches; ++microbatch) {
      run(rank, microbatch);
      if (microbatch + 1 == microbatches) break;
      at::NoGradGuard no_grad;
      for (Parameter& parameter : parameters_) keep_gradient(parameter);
    }
    at::NoGradGuard no_grad;
    for (Parameter& parameter : parameters_) {
      if (parameter.accumulated.defined()) keep_gradient(parameter);
      at::Tensor& grad = parameter.compute.mutable_grad();
      parameter.by_rank.push_back(std::exchange(
          parameter.accumulated.defined() ? parameter.accumulated : grad, at::Tensor()));
    }
  }
  end_computation();
  at::NoGradGuard no_grad;
  for (const Group& group : groups_) reduce(group);
  return losses;
}

void ReferenceTrainer::add_to_grad(Parameter& parameter, const at::Tensor& grad) const {
  at::Tensor& sum = parameter.master.mutable_grad();
  if (sum.defined()) {
    sum.add_(grad);
  } else {
    sum = grad;
  }
}

void ReferenceTrainer::reduce(const Group& group) {
  std::vector<size_t> reduced;
  for (const size_t i : group) {
    const auto& grads = parameters_[i].by_rank;
    const auto with = std::ranges::count_if(grads, [](const at::Tensor& g) { return g.defined(); });
    TORCH_CHECK(with == 0 || with == options_.world, "ReferenceTrainer: parameter '",
                parameters_[i].name, "' has a gradient on ", with, " of ", options_.world,
                " ranks; it must have one on all or none");
    if (with > 0) reduced.push_back(i);
  }
  if (reduced.empty()) return;
  const at::ScalarType dtype =
      options_.reduce_dtype.value_or(parameters_[reduced[0]].by_rank[0].scalar_type());
  if (options_.world == 1) {
    for (const size_t i : reduced) {
      Parameter& parameter = parameters_[i];
      add_to_grad(parameter, parameter.by_rank[0].to(dtype).to(parameter.master.scalar_type()));
    }
    return;
  }
  std::vector<at::Tensor> inputs;
  for (int rank = 0; rank < options_.world; ++rank) {
    std::vector<at::Tensor> shards;
    for (const size_t i : reduced) {
      shards.push_back(padded_shards(parameters_[i].by_rank[rank], options_.world, dtype));
    }
    inputs.push_back(at::cat(shards, 1).flatten());
  }
  const at::Tensor mean = mean_of_ranks(options_.order, inputs).view({options_.world, -1});
  int64_t offset = 0;
  for (const size_t i : reduced) {
    Parameter& parameter = parameters_[i];
    std::vector<int64_t> sizes = parameter.master.sizes().vec();
    sizes[0] = options_.world * chunk_rows(parameter.master, options_.world);
    const int64_t shard = c10::multiply_integers(sizes) / options_.world;
    add_to_grad(parameter, mean.narrow(1, offset, shard)
                               .reshape(sizes)
                               .narrow(0, 0, parameter.master.size(0))
                               .to(parameter.master.scalar_type())
                               .contiguous());
    offset += shard;
    parameter.by_rank.clear();
  }
}

// One a gradient. Finite orders p fold x^p, the sum's root is the norm of the whole.
std::vector<at::Tensor> ReferenceTrainer::folded_norms(const std::vector<at::Tensor>& grads,
                                                       double norm_type) const {
  std::vector<at::Tensor> by_rank;
  for (int rank = 0; rank < options_.world; ++rank) {
    std::vector<at::Tensor> norms;
    for (const at::Tensor& grad : grads) {
      const at::Tensor shard = shard_of(grad, options_.world, rank);
      if (std::isinf(norm_type)) {
        norms.push_back(shard.numel() == 0 ? at::zeros({}, grad.options()) : shard.abs().max());
      } else {
        norms.push_back(shard.norm(norm_type));
      }
    }
    by_rank.push_back(at::stack(norms));
  }
  if (options_.world == 1) return by_rank[0].unbind();
  if (std::isinf(norm_type)) {
    return fold(options_.order, comm::ReduceOp::max(), by_rank).unbind();
  }
  for (at::Tensor& norms : by_rank) norms = norms.pow(norm_type);
  return fold(options_.order, comm::ReduceOp::sum(), by_rank).pow(1.0 / norm_type).unbind();
}

double ReferenceTrainer::clip_grad_norm_(double max_norm, double norm_type, bool reproducible) {
  TORCH_CHECK(norm_type > 0, "ReferenceTrainer: norm_type is ", norm_type,
              ", must be positive or infinity");
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> grads;
  for (const at::Tensor& parameter : parameters()) {
    if (parameter.grad().defined()) grads.push_back(parameter.grad());
  }
  if (grads.empty()) return 0;
  at::Tensor total;
  if (reproducible) {
    total = optim::get_total_norm(grads, {.norm_type = norm_type, .reproducible = true});
  } else {
    const std::vector<at::Tensor> norms = folded_norms(grads, norm_type);
    total = norms[0];
    if (norms.size() > 1) {
      const at::Tensor all = at::stack(norms);
      total = std::isinf(norm_type) ? at::max(all) : all.norm(norm_type);
    }
  }
  const at::Tensor factor = at::clamp((total + 1e-6).reciprocal() * max_norm, std::nullopt, 1.0);
  for (const at::Tensor& grad : grads) grad.mul_(factor);
  return total.item<double>();
}

}  // namespace ppfsdp::train
