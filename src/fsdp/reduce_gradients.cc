// The backward half of FSDPParamGroup: from unsharded gradients to sharded ones.
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

void FSDPParamGroup::add_sharded_gradient(FSDPParam& param, const at::Tensor& local,
                                          comm::Stream& stream) {
  at::Tensor& grad = param.sharded.mutable_grad();
  if (grad.defined()) {
    const at::Tensor& sum = dtensor::local_of(grad);
    stream.run([sum, local] { sum.add_(local); });
    if (world() > 1) {
      // The first gradient may be the caller's, made on the compute stream.
      context_->used_by_reduce.push_back(sum);
    }
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
  comm::Stream& compute = context_->runtime.compute_stream();
  if (world() == 1) {
    // Nothing to overlap with: all of it stays on the stream that made the gradients.
    for (size_t i = 0; i < params.size(); ++i) {
      add_sharded_gradient(*params[i], grads[i].to(reduce_dtype).to(dtype).contiguous(), compute);
    }
    return;
  }
  context_->finish_reduce();

  FlatLayout layout{world(), 0, {}};
  for (const FSDPParam* param : params) {
    layout.add(c10::multiply_integers(param->sizes), chunk_numel(param->sizes, world()));
  }
  const auto buffer = [&](int64_t numel, comm::Stream& stream) {
    return uses_group_memory_ ? communicator().allocate(numel, reduce_dtype, stream)
                              : stream.empty({numel}, flat_shards_.options().dtype(reduce_dtype));
  };
  const at::Tensor input = buffer(layout.world * layout.part, compute);
  copy_in_all(layout, grads, input);
  std::string name(label());
  if (params.size() < params_.size()) {
    // Of parameters without a gradient the ranks must have the same.
    for (const FSDPParam* param : params) {
      name += (param == params.front() ? ": " : ", ") + param->fqn;
    }
  }
  comm::Stream& stream = *context_->reduce_scatter;
  // Behind the copies into the input; and behind what still used the sharded gradients of the last
  // step, in whose memory the output may lie.
  stream.wait(compute.record());
  at::Tensor output = buffer(layout.part, stream);
  if (reduce_dtype == at::kHalf) {
    const DivideFactors factors = fp16_divide_factors(world());
    stream.run([input, factors] { input.div_(factors.pre); });
    communicator().reduce_scatter(output, input, comm::ReduceOp::sum(), stream, name);
    stream.run([output, factors] { output.div_(factors.post); });
  } else {
    communicator().reduce_scatter(output, input, comm::ReduceOp::avg(), stream, name);
  }
  if (reduce_dtype != dtype) {
    const at::Tensor cast = stream.empty({layout.part}, flat_shards_.options().dtype(dtype));
    stream.run([cast, output] { cast.copy_(output); });
    output = cast;
  }
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& shard = dtensor::local_of(params[i]->sharded);
    add_sharded_gradient(*params[i],
                         output.as_strided(shard.sizes(), shard.strides(),
                                           output.storage_offset() + layout.params[i].offset),
                         stream);
  }
  context_->used_by_reduce.push_back(input);
  context_->reduce_event = stream.record();
}

}  // namespace ppfsdp::fsdp
