#include "src/optim/optimizer.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <unordered_set>
#include <utility>

#include "fmt/format.h"
#include "fmt/ranges.h"
#include "src/dtensor/dtensor.h"
#include "src/optim/local_part.h"
#include "src/optim/neighbours.h"

namespace ppfsdp::optim {
namespace {

std::string describe(const at::Tensor& tensor) {
  if (dtensor::is_dtensor(tensor)) return dtensor::spec_of(tensor)->str();
  return fmt::format("a plain tensor of sizes [{}]", fmt::join(tensor.sizes(), ", "));
}

}  // namespace

Optimizer::Optimizer(std::string name, std::vector<at::Tensor> parameters, double lr,
                     Implementation implementation, std::vector<std::string> state_names)
    : name_(std::move(name)),
      parameters_(std::move(parameters)),
      implementation_(implementation),
      state_names_(std::move(state_names)),
      states_(state_names_.size(), std::vector<at::Tensor>(parameters_.size())),
      step_counts_(parameters_.size(), 0) {
  TORCH_CHECK(!parameters_.empty(), name_, ": the list of parameters is empty");
  std::unordered_set<const c10::TensorImpl*> seen;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i];
    TORCH_CHECK(
        parameter.defined() && at::isFloatingType(parameter.scalar_type()) && parameter.is_leaf(),
        name_, ": parameter ", i, " must be a leaf tensor of floating point");
    TORCH_CHECK(seen.insert(parameter.unsafeGetTensorImpl()).second, name_, ": parameter ", i,
                " is in the list twice; Module::parameters() lists a tied parameter once");
    if (dtensor::is_dtensor(parameter)) {
      for (const dtensor::Placement& placement : dtensor::spec_of(parameter)->placements) {
        TORCH_CHECK(!placement.is_partial(), name_, ": parameter ", i, " is ", placement.str(),
                    "; a parameter must be sharded or replicated");
      }
    }
  }
  set_lr(lr);
}

void Optimizer::set_lr(double lr) {
  check_option(lr >= 0 && std::isfinite(lr), "lr", lr, "must be finite and not negative");
  lr_ = lr;
}

void Optimizer::check_option(bool right, const char* option, double value, const char* rule) const {
  TORCH_CHECK(right, name_, ": ", option, " is ", value, ", ", rule);
}

at::Tensor& Optimizer::state(size_t index, const std::string& name) {
  const auto found = std::ranges::find(state_names_, name);
  TORCH_CHECK(found != state_names_.end(), name_, " keeps no state called '", name, "'");
  return states_[found - state_names_.begin()].at(index);
}

void Optimizer::zero_grad(bool set_to_none) {
  for (at::Tensor& parameter : parameters_) {
    at::Tensor& grad = parameter.mutable_grad();
    if (!grad.defined()) continue;
    if (set_to_none) {
      grad.reset();
    } else {
      at::NoGradGuard no_grad;
      grad = grad.detach();
      grad.zero_();
    }
  }
}

at::Tensor Optimizer::local_grad(size_t index) const {
  const at::Tensor& parameter = parameters_[index];
  const at::Tensor& grad = parameter.grad();
  const bool sharded = dtensor::is_dtensor(parameter);
  TORCH_CHECK(dtensor::is_dtensor(grad) == sharded, name_, ": parameter ", index, " is a ",
              sharded ? "DTensor and its gradient a plain tensor"
                      : "plain tensor and its gradient a DTensor");
  TORCH_CHECK(grad.layout() == at::kStrided, name_, ": the gradient of parameter ", index,
              " must be dense, got layout ", grad.layout(), "; grad.to_dense() makes it so");
  TORCH_CHECK(grad.sizes() == parameter.sizes(), name_, ": the gradient ", grad.sizes(),
              " of parameter ", index, " does not have its size ", parameter.sizes());
  if (!sharded) return grad;
  const dtensor::SpecPtr &wanted = dtensor::spec_of(parameter), &given = dtensor::spec_of(grad);
  TORCH_CHECK(*given->mesh == *wanted->mesh, name_, ": parameter ", index, " is on ",
              wanted->mesh->str(), " and its gradient on ", given->mesh->str());
  if (given == wanted || given->placements == wanted->placements) return dtensor::local_of(grad);
  return dtensor::local_of(dtensor::redistribute(grad, wanted->placements));
}

// A state that was put in by hand, from a checkpoint say, and lies otherwise would broadcast.
void Optimizer::check_states(size_t index) const {
  const at::Tensor& parameter = parameters_[index];
  for (size_t s = 0; s < states_.size(); ++s) {
    const at::Tensor& state = states_[s][index];
    TORCH_CHECK(state.defined() == states_[0][index].defined(), name_, ": parameter ", index,
                " has its state '", state_names_[state.defined() ? s : 0], "' and lacks '",
                state_names_[state.defined() ? 0 : s], "'; set both or none");
    if (!state.defined()) continue;
    const bool alike = dtensor::is_dtensor(state) == dtensor::is_dtensor(parameter) &&
                       state.sizes() == parameter.sizes() &&
                       (!dtensor::is_dtensor(state) || dtensor::spec_of(state)->placements ==
                                                           dtensor::spec_of(parameter)->placements);
    TORCH_CHECK(alike, name_, ": state '", state_names_[s], "' of parameter ", index,
                " must be laid out as the parameter, ", describe(parameter), ", got ",
                describe(state));
  }
}

// The states of neighbours are made neighbours.
void Optimizer::create_states() {
  if (states_.empty()) return;
  const auto wanted = [&](size_t i) {
    return parameters_[i].grad().defined() && !states_[0][i].defined();
  };
  for (size_t begin = 0; begin < parameters_.size();) {
    if (!wanted(begin)) {
      ++begin;
      continue;
    }
    size_t end = begin + 1;
    int64_t numel = local_part(parameters_[begin]).numel();
    while (end < parameters_.size() && wanted(end) &&
           follows(local_part(parameters_[end - 1]), local_part(parameters_[end]))) {
      numel += local_part(parameters_[end++]).numel();
    }
    for (std::vector<at::Tensor>& states : states_) {
      if (end == begin + 1) {
        states[begin] = at::zeros_like(parameters_[begin]);
        continue;
      }
      const at::Tensor flat = at::zeros({numel}, local_part(parameters_[begin]).options());
      int64_t offset = 0;
      for (size_t i = begin; i < end; ++i) {
        const at::Tensor& local = local_part(parameters_[i]);
        const at::Tensor part = flat.narrow(0, offset, local.numel()).view(local.sizes());
        offset += local.numel();
        if (!dtensor::is_dtensor(parameters_[i])) {
          states[i] = part;
          continue;
        }
        const dtensor::SpecPtr& spec = dtensor::spec_of(parameters_[i]);
        states[i] =
            dtensor::from_local(part, spec->mesh, spec->placements, at::IntArrayRef(spec->sizes));
      }
    }
    begin = end;
  }
}

Optimizer::Batch Optimizer::join(const Batch& batch) {
  Batch joined;
  joined.states.resize(batch.states.size());
  for (size_t begin = 0; begin < batch.size();) {
    size_t end = begin + 1;
    int64_t numel = batch.parameters[begin].numel();
    const auto joins = [&](size_t i) {
      return batch.steps[i] == batch.steps[i - 1] &&
             follows(batch.parameters[i - 1], batch.parameters[i]) &&
             follows(batch.grads[i - 1], batch.grads[i]) &&
             std::ranges::all_of(batch.states, [&](const std::vector<at::Tensor>& states) {
               return follows(states[i - 1], states[i]);
             });
    };
    while (end < batch.size() && joins(end)) numel += batch.parameters[end++].numel();
    const bool alone = end == begin + 1;
    const auto part = [&](const at::Tensor& first) {
      return alone ? first : flat_from(first, numel);
    };
    joined.parameters.push_back(part(batch.parameters[begin]));
    joined.grads.push_back(part(batch.grads[begin]));
    for (size_t s = 0; s < batch.states.size(); ++s) {
      joined.states[s].push_back(part(batch.states[s][begin]));
    }
    joined.steps.push_back(batch.steps[begin]);
    begin = end;
  }
  return joined;
}

void Optimizer::step() {
  at::NoGradGuard no_grad;
  // All that can be wrong is found before anything changes.
  std::vector<at::Tensor> grads(parameters_.size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].grad().defined()) continue;
    grads[i] = local_grad(i);
    check_states(i);
  }
  create_states();
  std::map<std::pair<c10::Device, at::ScalarType>, Batch,
           decltype([](const auto& a, const auto& b) {
             return std::tuple(a.first.type(), a.first.index(), a.second) <
                    std::tuple(b.first.type(), b.first.index(), b.second);
           })>
      batches;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i];
    if (!grads[i].defined()) continue;
    const at::Tensor& local = local_part(parameter);
    ++step_counts_[i];
    if (local.numel() == 0) continue;
    Batch& batch = batches[{local.device(), local.scalar_type()}];
    batch.states.resize(states_.size());
    batch.parameters.push_back(local);
    batch.grads.push_back(std::move(grads[i]));
    for (size_t s = 0; s < states_.size(); ++s) {
      batch.states[s].push_back(local_part(states_[s][i]));
    }
    batch.steps.push_back(step_counts_[i]);
    note_write(parameter);
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (auto& [key, batch] : batches) {
    // Joined, the fused kernels would round elements at other places differently.
    if (implementation_ != Implementation::kFused) batch = join(batch);
    update(batch);
  }
}

}  // namespace ppfsdp::optim
