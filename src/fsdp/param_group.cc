#include "src/fsdp/param_group.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <numeric>

#include "src/dtensor/dtensor.h"
#include "src/nn/module.h"

namespace ppfsdp::fsdp {
namespace {

// A cache line: vector kernels start aligned, and neighbours share no line.
constexpr int64_t kAlignment = 64;

int64_t element_size(at::ScalarType dtype) { return static_cast<int64_t>(c10::elementSize(dtype)); }

// The one dtype of all parameters, or bytes. `layout` gets every parameter's extent in elements of
// it. With bytes, the widest dtypes come first, so that each parameter is aligned for its own.
at::ScalarType lay_out(const std::vector<FSDPParam>& params, at::ScalarType FSDPParam::*dtype,
                       int64_t world, int64_t split, FlatLayout& layout) {
  const bool uniform = std::all_of(params.begin(), params.end(), [&](const FSDPParam& param) {
    return param.*dtype == params.front().*dtype;
  });
  layout = FlatLayout{split, 0, std::vector<ParamExtent>(params.size())};
  std::vector<size_t> order(params.size());
  std::iota(order.begin(), order.end(), size_t{0});
  if (!uniform) {
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return element_size(params[a].*dtype) > element_size(params[b].*dtype);
    });
  }
  for (const size_t index : order) {
    const FSDPParam& param = params[index];
    const int64_t unit = uniform ? 1 : element_size(param.*dtype);
    // Padded to whole chunks of all ranks, then cut into `split` parts.
    const int64_t chunk = chunk_numel(param.sizes, world) * unit * world / split;
    layout.params[index] = {c10::multiply_integers(param.sizes) * unit, chunk, layout.part};
    layout.part += chunk;
  }
  if (!uniform) {
    // Every rank's part starts aligned for the widest dtype.
    layout.part = (layout.part + kAlignment - 1) / kAlignment * kAlignment;
  }
  return uniform ? params.front().*dtype : at::kByte;
}

}  // namespace

FSDPParamGroup::FSDPParamGroup(std::vector<FSDPParam> params, const FullyShardOptions& options)
    : params_(std::move(params)),
      mesh_(options.mesh),
      mp_policy_(options.mp_policy),
      shard_dtype_(at::kFloat),
      gather_dtype_(at::kFloat) {
  set_reshard_after_forward(options.reshard_after_forward);
  std::vector<at::Tensor> originals;
  for (FSDPParam& param : params_) {
    originals.push_back(param.sharded);
  }
  shard_parameters(originals);
}

FSDPParamGroup::~FSDPParamGroup() {
  if (context_ == nullptr) {
    return;
  }
  // The orders that prefetching follows outlive a module that is taken out of the model.
  for (auto* order :
       {&context_->forward_order, &context_->running_order, &context_->post_forward_order}) {
    std::replace(order->begin(), order->end(), this, static_cast<FSDPParamGroup*>(nullptr));
  }
  wait_unless_unwinding([this] { drop_unused_all_gather(); });
}

void FSDPParamGroup::set_layouts() {
  casts_ = false;
  for (FSDPParam& param : params_) {
    // Integers, such as quantised weights, mean something else in another dtype.
    param.compute_dtype = at::isFloatingType(param.dtype)
                              ? mp_policy_.param_dtype.value_or(param.dtype)
                              : param.dtype;
    casts_ = casts_ || param.compute_dtype != param.dtype;
  }
  shard_dtype_ = lay_out(params_, &FSDPParam::dtype, world(), world(), shard_layout_);
  gather_dtype_ = lay_out(params_, &FSDPParam::compute_dtype, world(), world(), gather_layout_);
  post_forward_layout_ = {};
}

at::Tensor FSDPParamGroup::local_view(size_t index) const {
  const FSDPParam& param = params_[index];
  std::vector<int64_t> sizes = param.sizes;
  sizes[0] = dtensor::shard_range(sizes[0], world(), rank()).length;
  return typed_view(flat_shards_, param.dtype,
                    shard_layout_.params[index].offset * element_size(shard_dtype_), sizes);
}

void FSDPParamGroup::shard_parameters(const std::vector<at::Tensor>& originals) {
  const c10::NoGradGuard no_grad;
  set_layouts();
  const at::Device device =
      originals.front().is_meta() ? at::Device(at::kMeta) : mesh_->runtime().device();
  flat_shards_ = at::zeros({shard_layout_.part}, at::TensorOptions(shard_dtype_).device(device));
  for (size_t i = 0; i < params_.size(); ++i) {
    FSDPParam& param = params_[i];
    const int64_t unit = shard_dtype_ == param.dtype ? 1 : element_size(param.dtype);
    const ParamExtent& extent = shard_layout_.params[i];
    const ParamExtent elements{extent.numel / unit, extent.chunk / unit, 0};
    copy_chunk(elements, rank(), originals[i].detach(),
               typed_view(flat_shards_, param.dtype, extent.offset * element_size(shard_dtype_),
                          {elements.chunk}));
    const bool requires_grad = originals[i].requires_grad();
    param.sharded = dtensor::from_local(local_view(i), mesh_, {dtensor::Placement::shard(0)},
                                        at::IntArrayRef(param.sizes));
    param.sharded.set_requires_grad(requires_grad);
    for (const Registration& registration : param.registrations) {
      registration.module->set_registered_parameter(registration.name, param.sharded);
      *registration.slot = param.sharded;
    }
  }
}

void FSDPParamGroup::make_unsharded_parameters() {
  // They serve training too, though inference may be the first to need them.
  const c10::InferenceMode no_inference(false);
  const c10::NoGradGuard no_grad;
  unsharded_flats_.clear();
  int64_t total = 0;
  std::vector<int64_t> offsets;
  for (const ParamExtent& extent : gather_layout_.params) {
    offsets.push_back(total);
    total +=
        (extent.numel * element_size(gather_dtype_) + kAlignment - 1) / kAlignment * kAlignment;
  }
  if (!aliased()) {
    unsharded_memory_ = at::empty({total}, flat_shards_.options().dtype(at::kByte));
  }
  for (size_t i = 0; i < params_.size(); ++i) {
    FSDPParam& param = params_[i];
    if (aliased()) {
      const int64_t offset = shard_layout_.params[i].offset * element_size(shard_dtype_);
      param.unsharded = typed_view(flat_shards_, param.compute_dtype, offset, param.sizes);
      continue;
    }
    param.unsharded = typed_view(unsharded_memory_, param.compute_dtype, offsets[i], param.sizes);
    unsharded_flats_.push_back(
        typed_view(unsharded_memory_, gather_dtype_, offsets[i], {gather_layout_.params[i].numel}));
  }
}

void FSDPParamGroup::lazy_init(std::shared_ptr<CommContext> context,
                               const std::string& module_fqn) {
  // Of an earlier root, whose streams go.
  drop_unused_all_gather();
  context_ = std::move(context);
  module_fqn_ = module_fqn;
  for (FSDPParam& param : params_) {
    param.fqn = nn::join_path(module_fqn, param.fqn);
  }
}

void FSDPParamGroup::set_reshard_after_forward(ReshardAfterForward value) {
  const int64_t shard_size = world();
  if (const int* k = std::get_if<int>(&value)) {
    TORCH_CHECK(*k > 0 && shard_size % *k == 0, "fully_shard: reshard_after_forward = ", *k,
                " must be a positive divisor of the shard size ", shard_size);
    if (*k == 1) {
      TORCH_WARN_ONCE("fully_shard: reshard_after_forward = 1 means false; write false");
      value = false;
    } else if (*k == shard_size) {
      value = true;
    }
  }
  reshard_after_forward_ = value;
}

bool FSDPParamGroup::reshard_after_forward_is_unset() const {
  return std::holds_alternative<std::monostate>(reshard_after_forward_);
}

int FSDPParamGroup::block_size() const {
  const int* k = std::get_if<int>(&reshard_after_forward_);
  return k == nullptr ? 0 : *k;
}

int64_t FSDPParamGroup::shard_versions() const {
  int64_t versions = 0;
  for (const FSDPParam& param : params_) {
    versions += static_cast<int64_t>(dtensor::local_of(param.sharded)._version());
  }
  return versions;
}

// The cast goes straight into this rank's slot of the all-gather's output, which is then in place.
// That output is the copy-in stream's, which writes it first: of the compute stream's memory it
// would have to wait for what that stream is still computing.
at::Tensor FSDPParamGroup::gather_copy(const FlatLayout& layout, comm::Communicator& group,
                                       const at::Tensor& shards) {
  comm::Stream& copy_in = *context_->copy_in;
  const int64_t numel = layout.world * layout.part;
  const at::Tensor output =
      uses_group_memory_ ? group.allocate(numel, gather_dtype_, copy_in)
                         : copy_in.empty({numel}, flat_shards_.options().dtype(gather_dtype_));
  const at::Tensor input = output.narrow(0, group.rank() * layout.part, layout.part);
  const bool is_cast_by_parameter = state_ != State::kPostForwardSharded && casts_ &&
                                    (shard_dtype_ == at::kByte || gather_dtype_ == at::kByte);
  if (!is_cast_by_parameter) {
    copy_in.run([input, shards] { input.copy_(shards); });
  } else {
    for (size_t i = 0; i < params_.size(); ++i) {
      const at::Tensor chunk = typed_view(input, params_[i].compute_dtype,
                                          layout.params[i].offset * element_size(gather_dtype_),
                                          dtensor::local_of(params_[i].sharded).sizes());
      copy_in.run([chunk, shard = local_view(i)] { chunk.copy_(shard); });
    }
  }
  context_->all_gather->wait(copy_in.record());
  group.all_gather_into(output, input, *context_->all_gather, label());
  return output;
}

void FSDPParamGroup::unshard() {
  if (parameters_were_replaced()) {
    drop_unused_all_gather();
    adopt_replaced_parameters();
  }
  // The optimizer (or a load) may have changed the shards since: what was gathered is out of date.
  const int64_t versions = shard_versions();
  if (pending_.has_value()) {
    if (versions == pending_->versions) {
      return;
    }
    drop_unused_all_gather();
  }
  if (versions != gathered_versions_) {
    if (context_->forward_root == nullptr) {
      // Forward waits for the change when it begins.
      context_->all_gathers_wait(context_->runtime.compute_stream().record());
    }
    if (state_ != State::kSharded) {
      to_sharded();
    }
  }
  if (state_ == State::kUnsharded) {
    return;
  }
  if (aliased()) {
    pending_ = Pending{{}, nullptr, nullptr, versions};
    return;
  }
  const bool from_block = state_ == State::kPostForwardSharded;
  const FlatLayout& layout = from_block ? post_forward_layout_ : gather_layout_;
  comm::Communicator& group =
      from_block ? *mesh_->block_communicator(0, layout.world) : communicator();
  const at::Tensor& shards = from_block ? post_forward_shards_ : flat_shards_;
  comm::Stream& stream = *context_->all_gather;
  const c10::NoGradGuard no_grad;
  const bool copies = uses_group_memory_ || (casts_ && !from_block);
  const at::Tensor output =
      copies ? gather_copy(layout, group, shards) : group.all_gather(shards, stream, label());
  pending_ = Pending{output, stream.record(), &layout, versions};
}

void FSDPParamGroup::unshard_now() {
  if (context_ == nullptr) {
    // Before lazy init: streams of its own until the root gives it the shared ones.
    context_ = std::make_shared<CommContext>(mesh_->runtime());
  }
  context_->all_gathers_wait(context_->runtime.compute_stream().record());
  unshard();
  wait_for_unshard();
}

void FSDPParamGroup::wait_for_unshard() {
  if (!pending_.has_value()) {
    return;
  }
  const Pending pending = std::move(*pending_);
  pending_.reset();
  gathered_versions_ = pending.versions;
  if (!aliased()) {
    comm::Stream& compute = context_->runtime.compute_stream();
    compute.wait(pending.event);
    if (unsharded_memory_.defined() && params_.front().unsharded.defined()) {
      context_->runtime.alloc_storage(unsharded_memory_);
    } else {
      make_unsharded_parameters();
    }
    copy_out_all(*pending.layout, pending.output, unsharded_flats_);
    // The buffer's memory goes back to the stream that allocated it, copy_in or all_gather, which
    // may use it again only after this copy. What was gathered, flat_shards_ or
    // post_forward_shards_, is the compute stream's, which has waited for the all-gather above.
    context_->all_gathers_wait(compute.record());
  } else if (!params_.front().unsharded.defined()) {
    make_unsharded_parameters();
  }
  post_forward_shards_.reset();
  to_unsharded();
}

void FSDPParamGroup::to_unsharded() {
  for (FSDPParam& param : params_) {
    const bool requires_grad = param.sharded.requires_grad();
    if (param.unsharded.requires_grad() != requires_grad) {
      param.unsharded.set_requires_grad(requires_grad);
    }
    for (const Registration& registration : param.registrations) {
      *registration.slot = param.unsharded;
    }
  }
  state_ = State::kUnsharded;
}

void FSDPParamGroup::free_unsharded() {
  // A slot that is read while sharded finds the DTensor, whose operations complain, not freed
  // memory.
  for (const FSDPParam& param : params_) {
    for (const Registration& registration : param.registrations) {
      *registration.slot = param.sharded;
    }
  }
  if (!aliased()) {
    context_->runtime.free_storage(unsharded_memory_);
  }
}

void FSDPParamGroup::to_sharded() {
  if (state_ == State::kUnsharded) {
    free_unsharded();
  }
  post_forward_shards_.reset();
  state_ = State::kSharded;
}

void FSDPParamGroup::to_post_forward_sharded() {
  const c10::NoGradGuard no_grad;
  const int block = block_size();
  if (post_forward_layout_.world != block || post_forward_layout_.params.empty()) {
    lay_out(params_, &FSDPParam::compute_dtype, world(), block, post_forward_layout_);
  }
  const int64_t index = rank() % block;
  const at::Tensor shards =
      at::empty({post_forward_layout_.part}, flat_shards_.options().dtype(gather_dtype_));
  for (size_t i = 0; i < params_.size(); ++i) {
    const ParamExtent& extent = post_forward_layout_.params[i];
    copy_chunk(extent, index, unsharded_flats_[i], shards.narrow(0, extent.offset, extent.chunk));
  }
  free_unsharded();
  post_forward_shards_ = shards;
  state_ = State::kPostForwardSharded;
  // Backward's all-gather reads the shards that this wrote.
  context_->all_gathers_wait(context_->runtime.compute_stream().record());
}

void FSDPParamGroup::reshard() {
  if (state_ != State::kUnsharded) {
    return;
  }
  if (training_state_ == TrainingState::kForward) {
    if (reshard_after_forward_ == ReshardAfterForward(false)) {
      return;
    }
    if (block_size() > 0) {
      to_post_forward_sharded();
      return;
    }
  }
  to_sharded();
}

void FSDPParamGroup::drop_unused_all_gather() {
  if (pending_.has_value()) {
    if (pending_->event != nullptr) {
      // The shards that it reads are the compute stream's, its output may be the copy-in stream's.
      context_->runtime.compute_stream().wait(pending_->event);
      context_->copy_in->wait(pending_->event);
    }
    pending_.reset();
  }
}

FSDPParamGroup* FSDPParamGroup::next_in_forward() const {
  // The k-th group to run is expected to be the k-th of the last forward; a model that chooses its
  // path anew each time gets no prefetch rather than a wrong one.
  const size_t position = context_->running_order.size() - 1;
  const auto& order = context_->forward_order;
  return position + 1 < order.size() && order[position] == this ? order[position + 1] : nullptr;
}

FSDPParamGroup* FSDPParamGroup::next_in_backward() {
  if (post_forward_indices_.empty()) {
    return nullptr;
  }
  const size_t index = post_forward_indices_.back();
  post_forward_indices_.pop_back();
  const auto& order = context_->post_forward_order;
  return index > 0 && index <= order.size() ? order[index - 1] : nullptr;
}

void FSDPParamGroup::pre_forward(bool recomputes) {
  training_state_ = TrainingState::kForward;
  unshard();
  wait_for_unshard();
  if (recomputes) {
    return;
  }
  context_->running_order.push_back(this);
  if (FSDPParamGroup* next = next_in_forward()) {
    next->unshard();
  }
}

void FSDPParamGroup::post_forward(bool recomputes) {
  if (!recomputes) {
    reshard();
    if (c10::GradMode::is_enabled()) {
      post_forward_indices_.push_back(context_->post_forward_order.size());
      context_->post_forward_order.push_back(this);
    }
  }
  training_state_ = TrainingState::kIdle;
}

void FSDPParamGroup::pre_backward() {
  if (training_state_ == TrainingState::kPreBackward) {
    return;
  }
  training_state_ = TrainingState::kPreBackward;
  unshard();
  wait_for_unshard();
  if (FSDPParamGroup* next = next_in_backward()) {
    next->unshard();
  }
}

void FSDPParamGroup::drop_unsharded_gradients() {
  for (FSDPParam& param : params_) {
    param.accumulated_grad.reset();
    if (param.unsharded.defined()) {
      param.unsharded.mutable_grad().reset();
    }
  }
}

void FSDPParamGroup::finalize_backward() {
  drop_unused_all_gather();
  post_forward_indices_.clear();
}

}  // namespace ppfsdp::fsdp
