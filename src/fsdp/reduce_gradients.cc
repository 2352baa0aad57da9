// The backward half of FSDPParamGroup: from unsharded gradients to sharded ones.
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

#include <string>

#include "src/dtensor/dtensor.h"
#include "src/fsdp/param_group.h"

namespace ppfsdp::fsdp {
namespace {

/// How a sum over `world` ranks becomes a mean without leaving fp16's range: divided by about
/// sqrt(world) before and by the rest after the sum. `pre` is the largest power of two that divides
/// world with world / pre > pre, doubled once more (FSDP2's rule).
struct DivideFactors {
  double pre = 1;
  double post = 1;
};

DivideFactors fp16_divide_factors(int64_t world) {
  int64_t pre = 1;
  while (world % pre == 0 && static_cast<double>(world) / static_cast<double>(pre) > pre) {
    pre *= 2;
  }
  return {static_cast<double>(pre), static_cast<double>(world) / static_cast<double>(pre)};
}

}  // namespace

void FSDPParamGroup::post_backward() {
  training_state_ = TrainingState::kPostBackward;
  const c10::NoGradGuard no_grad;
  if (reduce_grads_) {
    reduce_gradients();
    return;
  }
  keep_gradients();
  if (reshard_after_backward_) {
    reshard();
  }
}

// Without synchronisation gradients add up unsharded. They stay in the unsharded parameter's grad,
// where autograd adds to them, unless they are to be kept in another dtype.
void FSDPParamGroup::keep_gradients() {
  for (FSDPParam& param : params_) {
    const at::Tensor& grad = param.unsharded.grad();
    if (!grad.defined()) {
      continue;
    }
    if (param.accumulated_grad.defined()) {
      param.accumulated_grad.add_(grad);
    } else if (grad.scalar_type() != mp_policy_.reduce_dtype.value_or(grad.scalar_type())) {
      param.accumulated_grad = grad.to(*mp_policy_.reduce_dtype);
    } else {
      continue;
    }
    param.unsharded.mutable_grad().reset();
  }
}

at::Tensor FSDPParamGroup::take_gradient(FSDPParam& param) {
  at::Tensor grad = param.unsharded.defined() ? param.unsharded.grad() : at::Tensor();
  if (param.accumulated_grad.defined()) {
    if (grad.defined()) {
      param.accumulated_grad.add_(grad);
    }
    grad = std::move(param.accumulated_grad);
    param.accumulated_grad = at::Tensor();
  }
  if (grad.defined()) {
    param.unsharded.mutable_grad().reset();
  }
  return grad;
}

void FSDPParamGroup::add_sharded_gradient(FSDPParam& param, const at::Tensor& local) {
  at::Tensor& grad = param.sharded.mutable_grad();
  if (grad.defined()) {
    context_->reduce_scatter->run([sum = dtensor::local_of(grad), local] { sum.add_(local); });
    return;
  }
  grad = dtensor::from_local(local, mesh_, {dtensor::Placement::shard(0)},
                             at::IntArrayRef(param.sizes));
}

void FSDPParamGroup::reduce_gradients() {
  std::vector<FSDPParam*> params;
  std::vector<at::Tensor> grads;
  for (FSDPParam& param : params_) {
    if (at::Tensor grad = take_gradient(param); grad.defined()) {
      params.push_back(&param);
      grads.push_back(std::move(grad));
    }
  }
  if (reshard_after_backward_) {
    reshard();
  }
  if (params.empty()) {
    return;
  }
  const at::ScalarType dtype = params.front()->dtype;
  const at::ScalarType reduce_dtype = mp_policy_.reduce_dtype.value_or(grads.front().scalar_type());
  for (const FSDPParam* param : params) {
    TORCH_CHECK(param->dtype == dtype, "fully_shard: gradients of one group must have one dtype; '",
                params.front()->fqn, "' has ", dtype, ", '", param->fqn, "' has ", param->dtype);
  }
  if (world() == 1) {
    context_->reduce_scatter->wait(context_->runtime.compute_stream().record());
    for (size_t i = 0; i < params.size(); ++i) {
      add_sharded_gradient(*params[i], grads[i].to(reduce_dtype).to(dtype).contiguous());
    }
    context_->reduce_event = context_->reduce_scatter->record();
    return;
  }
  context_->finish_reduce();

  FlatLayout layout{world(), 0, {}};
  for (const FSDPParam* param : params) {
    layout.add(c10::multiply_integers(param->sizes), chunk_numel(param->sizes, world()));
  }
  comm::Runtime& runtime = context_->runtime;
  const at::TensorOptions options = flat_shards_.options().dtype(reduce_dtype);
  const at::Tensor input = at::empty({layout.world * layout.part}, options);
  for (size_t i = 0; i < grads.size(); ++i) {
    copy_in(layout, i, grads[i], input);
    grads[i].reset();
  }
  std::string name(label());
  if (params.size() < params_.size()) {
    // Of parameters without a gradient the ranks must have the same.
    for (const FSDPParam* param : params) {
      name += (param == params.front() ? ": " : ", ") + param->fqn;
    }
  }
  comm::Stream& stream = *context_->reduce_scatter;
  at::Tensor output = at::empty({layout.part}, options);
  stream.wait(runtime.compute_stream().record());
  if (reduce_dtype == at::kHalf) {
    const DivideFactors factors = fp16_divide_factors(world());
    stream.run([input, factors] { input.div_(factors.pre); });
    communicator().reduce_scatter(output, input, comm::ReduceOp::sum(), stream, name);
    stream.run([output, factors] { output.div_(factors.post); });
  } else {
    communicator().reduce_scatter(output, input, comm::ReduceOp::avg(), stream, name);
  }
  if (reduce_dtype != dtype) {
    const at::Tensor cast = at::empty({layout.part}, options.dtype(dtype));
    stream.run([cast, output] { cast.copy_(output); });
    output = cast;
  }
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& shard = dtensor::local_of(params[i]->sharded);
    add_sharded_gradient(*params[i],
                         output.as_strided(shard.sizes(), shard.strides(),
                                           output.storage_offset() + layout.params[i].offset));
  }
  context_->reduce_input = input;
  context_->reduce_event = stream.record();
}

}  // namespace ppfsdp::fsdp
