#include "src/optim/sgd.h"

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_fused_sgd.h>
#include <c10/util/Exception.h>

#include <utility>

namespace ppfsdp::optim {
namespace {

constexpr size_t kMomentum = 0;

}  // namespace

SGD::SGD(std::vector<at::Tensor> parameters, const SGDOptions& options)
    : Optimizer("SGD", std::move(parameters), options.lr, options.implementation,
                options.momentum != 0 ? std::vector<std::string>{"momentum_buffer"}
                                      : std::vector<std::string>{}),
      options_(options) {
  check_option(options.momentum >= 0, "momentum", options.momentum, "must not be negative");
  check_option(options.weight_decay >= 0, "weight_decay", options.weight_decay,
               "must not be negative");
  check_option(!options.nesterov || options.momentum > 0, "momentum", options.momentum,
               "must be positive with nesterov");
  check_option(!options.nesterov || options.dampening == 0, "dampening", options.dampening,
               "must be 0 with nesterov");
}

void SGD::update(Batch& batch) {
  switch (implementation()) {
    case Implementation::kSingleTensor:
      return update_single(batch);
    case Implementation::kForeach:
      return update_foreach(batch);
    case Implementation::kFused:
      return update_fused(batch);
  }
}

void SGD::update_single(Batch& batch) const {
  for (size_t i = 0; i < batch.size(); ++i) {
    const at::Tensor& parameter = batch.parameters[i];
    at::Tensor grad = batch.grads[i];
    if (options_.weight_decay != 0) grad = grad.add(parameter, options_.weight_decay);
    if (options_.momentum != 0) {
      const at::Tensor& buffer = batch.states[kMomentum][i];
      if (batch.steps[i] == 1) {
        buffer.copy_(grad);
      } else {
        buffer.mul_(options_.momentum).add_(grad, 1 - options_.dampening);
      }
      grad = options_.nesterov ? grad.add(buffer, options_.momentum) : buffer;
    }
    parameter.add_(grad, -lr());
  }
}

void SGD::update_foreach(Batch& batch) const {
  std::vector<at::Tensor> grads = batch.grads;
  if (options_.weight_decay != 0) {
    grads = at::_foreach_add(grads, batch.parameters, options_.weight_decay);
  }
  if (options_.momentum != 0) {
    std::vector<at::Tensor> fresh, fresh_grads, used, used_grads;
    for (size_t i = 0; i < batch.size(); ++i) {
      const bool first = batch.steps[i] == 1;
      (first ? fresh : used).push_back(batch.states[kMomentum][i]);
      (first ? fresh_grads : used_grads).push_back(grads[i]);
    }
    if (!fresh.empty()) at::_foreach_copy_(fresh, fresh_grads);
    if (!used.empty()) {
      at::_foreach_mul_(used, options_.momentum);
      at::_foreach_add_(used, used_grads, 1 - options_.dampening);
    }
    const std::vector<at::Tensor>& buffers = batch.states[kMomentum];
    grads = options_.nesterov ? at::_foreach_add(grads, buffers, options_.momentum) : buffers;
  }
  at::_foreach_add_(batch.parameters, grads, -lr());
}

void SGD::update_fused(Batch& batch) const {
  // The kernel is told once for all parameters whether this is their first step.
  for (const bool first : {true, false}) {
    std::vector<at::Tensor> parameters, grads, buffers;
    for (size_t i = 0; i < batch.size(); ++i) {
      if ((batch.steps[i] == 1) != first) continue;
      parameters.push_back(batch.parameters[i]);
      grads.push_back(batch.grads[i]);
      if (options_.momentum != 0) buffers.push_back(batch.states[kMomentum][i]);
    }
    if (parameters.empty()) continue;
    at::_fused_sgd_(parameters, grads, buffers, options_.weight_decay, options_.momentum, lr(),
                    options_.dampening, options_.nesterov, /*maximize=*/false,
                    /*is_first_step=*/first && options_.momentum != 0);
  }
}

}  // namespace ppfsdp::optim
