#include "src/optim/clip_grad_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "src/dtensor/dtensor.h"
#include "src/optim/local_part.h"
#include "src/optim/neighbours.h"

namespace ppfsdp::optim {
namespace {

using dtensor::Placement;

/// Whether every rank's part of the gradients is a share of the whole, on one mesh.
bool all_sharded(const std::vector<at::Tensor>& grads) {
  return std::ranges::all_of(grads, [&](const at::Tensor& grad) {
    if (!dtensor::is_dtensor(grad)) return false;
    const dtensor::Spec& spec = *dtensor::spec_of(grad);
    return *spec.mesh == *dtensor::spec_of(grads[0])->mesh &&
           std::ranges::all_of(spec.placements, [](const Placement& placement) {
             return placement.is_shard() || placement.is_strided_shard();
           });
  });
}

std::vector<at::Tensor> norms_of(const std::vector<at::Tensor>& grads, double norm_type,
                                 bool foreach) {
  // An empty shard has no maximum, and no share in any norm.
  std::vector<at::Tensor> norms(grads.size()), filled;
  for (size_t i = 0; i < grads.size(); ++i) {
    if (grads[i].numel() == 0) {
      norms[i] = at::zeros({}, grads[i].options());
    } else if (foreach) {
      filled.push_back(grads[i]);
    } else {
      norms[i] = at::linalg_vector_norm(grads[i], norm_type);
    }
  }
  if (filled.empty()) return norms;
  const std::vector<at::Tensor> found = at::_foreach_norm(filled, norm_type);
  for (size_t i = 0, next = 0; i < norms.size(); ++i) {
    if (!norms[i].defined()) norms[i] = found[next++];
  }
  return norms;
}

/// The norm of each gradient, stacked; whole on every rank.
at::Tensor stacked_norms(const std::vector<at::Tensor>& grads, double norm_type, bool foreach) {
  if (!all_sharded(grads)) {
    const at::Tensor norms = at::stack(norms_of(grads, norm_type, foreach));
    return dtensor::is_dtensor(norms) ? dtensor::full_tensor(norms) : norms;
  }
  std::vector<at::Tensor> locals;
  for (const at::Tensor& grad : grads) locals.push_back(local_part(grad));
  const at::Tensor norms = at::stack(norms_of(locals, norm_type, foreach));
  const mesh::DeviceMeshPtr& mesh = dtensor::spec_of(grads[0])->mesh;
  const Placement partial = std::isinf(norm_type)
                                ? Placement::partial(Placement::PartialOp::kMax)
                                : Placement::partial(Placement::PartialOp::kNorm, norm_type);
  return dtensor::full_tensor(
      dtensor::from_local(norms, mesh, dtensor::Placements(mesh->ndim(), partial), norms.sizes()));
}

}  // namespace

at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                           double norm_type, bool error_if_nonfinite, bool foreach) {
  TORCH_CHECK(norm_type > 0, "clip_grad_norm_: norm_type is ", norm_type,
              ", must be positive or infinity");
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> grads;
  for (const at::Tensor& parameter : parameters) {
    if (parameter.grad().defined()) grads.push_back(parameter.grad());
  }
  if (grads.empty()) return at::zeros({});
  const at::Tensor total =
      at::linalg_vector_norm(stacked_norms(grads, norm_type, foreach), norm_type);
  if (error_if_nonfinite) {
    const auto value = total.item<double>();
    TORCH_CHECK(std::isfinite(value), "clip_grad_norm_: the norm of order ", norm_type,
                " of the gradients is ", value,
                "; it can't be clipped (error_if_nonfinite = false would scale by it)");
  }
  // A reciprocal and a product, where a division would round once: as Python's `float / tensor`.
  const at::Tensor factor = at::clamp((total + 1e-6).reciprocal() * max_norm, std::nullopt, 1.0);
  std::vector<at::Tensor> locals;
  for (const at::Tensor& grad : grads) {
    locals.push_back(local_part(grad));
    note_write(grad);
  }
  locals = join_neighbours(locals);
  if (foreach) {
    at::_foreach_mul_(locals, factor);
  } else {
    for (const at::Tensor& local : locals) local.mul_(factor);
  }
  return total;
}

}  // namespace ppfsdp::optim
