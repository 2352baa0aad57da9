#include "src/optim/optimizer.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <unordered_set>
#include <utility>

#include "src/dtensor/dtensor.h"
#include "src/optim/local_part.h"

namespace ppfsdp::optim {
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
  if (!sharded) return grad;
  const dtensor::SpecPtr &wanted = dtensor::spec_of(parameter), &given = dtensor::spec_of(grad);
  TORCH_CHECK(*given->mesh == *wanted->mesh, name_, ": parameter ", index, " is on ",
              wanted->mesh->str(), " and its gradient on ", given->mesh->str());
  if (given == wanted || given->placements == wanted->placements) return dtensor::local_of(grad);
  return dtensor::local_of(dtensor::redistribute(grad, wanted->placements));
}

void Optimizer::step() {
  at::NoGradGuard no_grad;
  std::map<std::pair<c10::Device, at::ScalarType>, Batch,
           decltype([](const auto& a, const auto& b) {
             return std::tuple(a.first.type(), a.first.index(), a.second) <
                    std::tuple(b.first.type(), b.first.index(), b.second);
           })>
      batches;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i];
    if (!parameter.grad().defined()) continue;
    at::Tensor grad = local_grad(i);
    const at::Tensor& local = local_part(parameter);
    TORCH_CHECK(grad.sizes() == local.sizes(), name_, ": the gradient ", grad.sizes(),
                " of parameter ", i, " does not have its size ", local.sizes());
    ++step_counts_[i];
    for (std::vector<at::Tensor>& states : states_) {
      if (!states[i].defined()) states[i] = at::zeros_like(parameter);
    }
    if (local.numel() == 0) continue;
    Batch& batch = batches[{local.device(), local.scalar_type()}];
    batch.states.resize(states_.size());
    batch.parameters.push_back(local);
    batch.grads.push_back(std::move(grad));
    for (size_t s = 0; s < states_.size(); ++s) {
      batch.states[s].push_back(local_part(states_[s][i]));
    }
    batch.steps.push_back(step_counts_[i]);
    note_write(parameter);
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (auto& [key, batch] : batches) update(batch);
}

}  // namespace ppfsdp::optim
