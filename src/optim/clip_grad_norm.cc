#include "src/optim/clip_grad_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/clamp.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <map>
#include <optional>
#include <utility>

#include "src/dtensor/dtensor.h"
#include "src/optim/local_part.h"
#include "src/optim/neighbours.h"

namespace ppfsdp::optim {
namespace {

std::vector<at::Tensor> gradients_of(const char* function,
                                     const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> gradients;
  for (size_t i = 0; i < parameters.size(); ++i) {
    TORCH_CHECK(parameters[i].defined(), function, ": parameter ", i, " of ", parameters.size(),
                " is undefined");
    if (parameters[i].grad().defined()) gradients.push_back(parameters[i].grad());
  }
  return gradients;
}

void check_max_norm(const char* function, double max_norm) {
  TORCH_CHECK(max_norm >= 0, function, ": max_norm is ", max_norm, ", must not be negative");
}

/// `total` is whole.
void scale(const std::vector<at::Tensor>& gradients, double max_norm, const at::Tensor& total,
           bool foreach) {
  // Without a limit there is nothing to do; and by an infinite norm, infinity times 0 is NaN.
  if (gradients.empty() || std::isinf(max_norm)) return;
  // A reciprocal and a product, where a division would round once: as Python's `float / tensor`.
  const at::Tensor factor = at::clamp((total + 1e-6).reciprocal() * max_norm, std::nullopt, 1.0);
  std::vector<at::Tensor> locals;
  for (const at::Tensor& gradient : gradients) {
    locals.push_back(local_part(gradient));
    note_write(gradient);
  }
  locals = join_neighbours(locals);
  if (!foreach) {
    for (const at::Tensor& local : locals) local.mul_(factor.to(local.device()));
    return;
  }
  // LibTorch's fast kernels take one device and dtype.
  std::map<std::pair<std::pair<at::DeviceType, int>, at::ScalarType>, std::vector<at::Tensor>>
      groups;
  for (const at::Tensor& local : locals) {
    const at::Device device = local.device();
    groups[{{device.type(), device.index()}, local.scalar_type()}].push_back(local);
  }
  for (const auto& group : groups) {
    at::_foreach_mul_(group.second, factor.to(group.second.front().device()));
  }
}

}  // namespace

at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                           const NormOptions& options) {
  check_max_norm("clip_grad_norm_", max_norm);
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> gradients = gradients_of("clip_grad_norm_", parameters);
  at::Tensor total = get_total_norm(gradients, options);
  scale(gradients, max_norm, total, options.foreach);
  return total;
}

at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                           double norm_type, bool error_if_nonfinite, bool foreach) {
  return clip_grad_norm_(
      parameters, max_norm,
      {.norm_type = norm_type, .error_if_nonfinite = error_if_nonfinite, .foreach = foreach});
}

void clip_grads_with_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                           const at::Tensor& total_norm, bool foreach) {
  check_max_norm("clip_grads_with_norm_", max_norm);
  TORCH_CHECK(total_norm.defined() && total_norm.dim() == 0,
              "clip_grads_with_norm_: total_norm must be a tensor without dims, got ",
              total_norm.defined() ? "one of sizes " : "an undefined one",
              total_norm.defined() ? total_norm.sizes() : c10::IntArrayRef());
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> gradients = gradients_of("clip_grads_with_norm_", parameters);
  // Even where this rank has no gradients: the others' reduction needs it.
  const at::Tensor total =
      dtensor::is_dtensor(total_norm) ? dtensor::full_tensor(total_norm) : total_norm;
  scale(gradients, max_norm, total, foreach);
}

}  // namespace ppfsdp::optim
