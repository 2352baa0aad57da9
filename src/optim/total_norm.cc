#include "src/optim/total_norm.h"

#include <ATen/core/grad_mode.h>
#include <ATen/native/utils/ParamsHash.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <unordered_map>
#include <utility>

#include "fmt/format.h"
#include "src/comm/communicator.h"
#include "src/comm/runtime.h"
#include "src/dtensor/dtensor.h"
#include "src/dtensor/redistribute.h"
#include "src/dtensor/rules/reduction.h"
#include "src/optim/exact_sum.h"
#include "src/optim/power_sum.h"

namespace ppfsdp::optim {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// A dim of a mesh, for the group of ranks along it.
struct MeshDim {
  mesh::DeviceMeshPtr mesh;
  int64_t dim;

  comm::Communicator& group() const { return mesh->communicator(dim); }
};

/// Local parts of tensors that are split along the same groups of ranks.
struct Part {
  std::vector<size_t> dims;  ///< indices into Layout::dims, ascending
  std::vector<at::Tensor> locals;
};

/// What is to be reduced along what.
///
/// The order of `dims`, in which all ranks go through the groups they are in, must not lead into a
/// deadlock although ranks see different meshes. It is that of the first tensor on a mesh with such
/// a group, which all members of a group agree on, since lists have one structure; and within a
/// mesh it is the last dim first, as in redistribution.
struct Layout {
  std::vector<MeshDim> dims;
  std::vector<Part> parts;
};

/// The indices into `layout.dims` of the groups that split the DTensor.
std::vector<size_t> split_dims(const dtensor::Spec& spec, Layout& layout) {
  std::vector<size_t> split;
  for (int64_t dim = spec.mesh->ndim() - 1; dim >= 0; --dim) {
    if (spec.mesh->size(dim) == 1) continue;
    const std::vector<int>& ranks = spec.mesh->communicator(dim).ranks();
    const auto found = std::ranges::find_if(
        layout.dims, [&](const MeshDim& known) { return known.group().ranks() == ranks; });
    const size_t index = found - layout.dims.begin();
    if (found == layout.dims.end()) layout.dims.push_back({spec.mesh, dim});
    if (dtensor::splits(spec.placements[dim])) split.push_back(index);
  }
  std::ranges::sort(split);
  return split;
}

Layout layout_of(const std::vector<at::Tensor>& tensors) {
  Layout layout;
  for (size_t i = 0; i < tensors.size(); ++i) {
    at::Tensor tensor = tensors[i];
    TORCH_CHECK(tensor.defined(), "get_total_norm: tensor ", i, " of ", tensors.size(),
                " is undefined; leave out what has no gradient");
    std::vector<size_t> dims;
    if (dtensor::is_dtensor(tensor)) {
      // No norm of a sum is a function of the parts' norms.
      dtensor::Placements placements = dtensor::spec_of(tensor)->placements;
      for (dtensor::Placement& placement : placements) {
        placement = placement.is_partial() ? dtensor::Placement::replicate() : placement;
      }
      tensor = dtensor::redistribute(tensor, placements);
      dims = split_dims(*dtensor::spec_of(tensor), layout);
      tensor = dtensor::local_of(tensor);
    }
    auto part = std::ranges::find(layout.parts, dims, &Part::dims);
    if (part == layout.parts.end()) part = layout.parts.insert(part, {dims, {}});
    part->locals.push_back(std::move(tensor));
  }
  return layout;
}

/// Tensors by device and dtype, in the order that Python's functions have from the same map. Ranks
/// have to agree on it, so the index of the device is left out where tensors are shards.
std::vector<std::vector<at::Tensor>> by_device_and_dtype(const Part& part) {
  using Key = std::pair<at::Device, at::ScalarType>;
  std::unordered_map<Key, std::vector<at::Tensor>, at::native::ParamsHash<Key>> groups;
  for (const at::Tensor& local : part.locals) {
    const at::Device device =
        part.dims.empty() ? local.device() : at::Device(local.device().type());
    groups[{device, local.scalar_type()}].push_back(local);
  }
  std::vector<std::vector<at::Tensor>> result;
  result.reserve(groups.size());
  for (auto& group : groups) result.push_back(std::move(group.second));
  return result;
}

/// The norm of each tensor, in their order. LibTorch refuses norms of no elements that have no
/// greatest or least one; they have no share in the whole.
std::vector<at::Tensor> norms_of(const std::vector<at::Tensor>& tensors,
                                 const NormOptions& options) {
  std::vector<at::Tensor> filled;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() > 0) filled.push_back(tensor);
  }
  std::vector<at::Tensor> norms;
  if (options.foreach && !filled.empty()) {
    norms = at::_foreach_norm(filled, options.norm_type);
  } else {
    for (const at::Tensor& tensor : filled) {
      norms.push_back(at::linalg_vector_norm(tensor, options.norm_type));
    }
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].numel() > 0) continue;
    const auto dtype = c10::toRealValueType(tensors[i].scalar_type());
    norms.insert(
        norms.begin() + static_cast<std::ptrdiff_t>(i),
        at::full({}, options.norm_type < 0 ? kInfinity : 0.0, tensors[i].options().dtype(dtype)));
  }
  return norms;
}

/// Applies `reduce` along each of the layout's groups to what is split along it: values[i], one row
/// or element a tensor, belongs to part i. All of them travel together.
template <typename Reduce>
void reduce_parts(const Layout& layout, std::vector<at::Tensor>& values, const Reduce& reduce) {
  for (size_t d = 0; d < layout.dims.size(); ++d) {
    std::vector<at::Tensor*> split;
    for (size_t i = 0; i < values.size(); ++i) {
      if (std::ranges::count(layout.parts[i].dims, d) > 0) split.push_back(&values[i]);
    }
    if (split.empty()) continue;
    std::vector<at::Tensor> pieces;
    pieces.reserve(split.size());
    for (const at::Tensor* value : split) pieces.push_back(*value);
    const at::Tensor all = pieces.size() == 1 ? pieces[0] : at::cat(pieces);
    reduce(all, layout.dims[d]);
    int64_t offset = 0;
    for (at::Tensor* value : split) {
      *value = all.narrow(0, offset, value->size(0));
      offset += value->size(0);
    }
  }
}

/// Of the tensors in `layout`, whole; no tensors have no share in a norm.
at::Tensor norm_of_norms(const Layout& layout, const NormOptions& options) {
  const double p = options.norm_type;
  if (layout.parts.empty()) {
    return at::full({}, p < 0 ? kInfinity : 0.0, options.stages->runtime().device());
  }
  const at::Device device = layout.parts.front().locals.front().device();
  std::vector<at::Tensor> norms;
  for (const Part& part : layout.parts) {
    std::vector<at::Tensor> of_part;
    for (const std::vector<at::Tensor>& group : by_device_and_dtype(part)) {
      for (const at::Tensor& norm : norms_of(group, options)) of_part.push_back(norm.to(device));
    }
    norms.push_back(at::stack(of_part));
  }
  const dtensor::Placement partial = dtensor::norm_partial(p);
  reduce_parts(layout, norms, [&](const at::Tensor& values, const MeshDim& dim) {
    dtensor::reduce_along(values, *dim.mesh, dim.dim, partial);
  });
  return at::linalg_vector_norm(norms.size() == 1 ? norms[0] : at::cat(norms), p);
}

at::Tensor plain_norm(const Layout& layout, const NormOptions& options) {
  at::Tensor total = norm_of_norms(layout, options);
  if (options.stages == nullptr) return total;
  // In double: stages may have different dtypes, or nothing.
  const at::Tensor whole = total.to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
  for (int64_t dim = options.stages->ndim() - 1; dim >= 0; --dim) {
    dtensor::reduce_along(whole, *options.stages, dim, dtensor::norm_partial(options.norm_type));
  }
  return whole.to(total.scalar_type());
}

/// Adds up the ranks' words, integers. Their number says nothing of the tensors; `label` does.
void add_up(const at::Tensor& words, const MeshDim& dim, const std::string& label) {
  if (dim.group().size() == 1) return;
  comm::Stream& stream = dim.mesh->runtime().compute_stream();
  dim.group().all_reduce(words, comm::ReduceOp::sum(), stream, label);
  stream.synchronize();
}

at::Tensor words_of(const ExactSum& sum) {
  at::Tensor words = at::zeros({1, ExactSum::kWords}, at::kLong);
  sum.store(words.mutable_data_ptr<int64_t>());
  return words;
}

ExactSum whole_sum(const Layout& layout, const NormOptions& options) {
  std::vector<at::Tensor> words;
  size_t tensors = 0;
  for (const Part& part : layout.parts) {
    tensors += part.locals.size();
    ExactSum sum;
    for (const at::Tensor& local : part.locals) add_power_sum(local, options.norm_type, sum);
    words.push_back(words_of(sum));
  }
  const std::string label = fmt::format("norm of {} tensors", tensors);
  reduce_parts(layout, words,
               [&](const at::Tensor& rows, const MeshDim& dim) { add_up(rows, dim, label); });
  ExactSum total;
  for (const at::Tensor& row : words) total.add(ExactSum::load(row.const_data_ptr<int64_t>()));
  if (options.stages == nullptr) return total;
  const at::Tensor row = words_of(total);
  for (int64_t dim = 0; dim < options.stages->ndim(); ++dim) {
    add_up(row, {options.stages, dim}, "norm of all stages");
  }
  return ExactSum::load(row.const_data_ptr<int64_t>());
}

at::Tensor exact_norm(const Layout& layout, const NormOptions& options) {
  const double p = options.norm_type;
  bool has_double = false;
  for (const Part& part : layout.parts) {
    for (const at::Tensor& local : part.locals) {
      has_double = has_double || local.scalar_type() == at::kDouble;
      TORCH_CHECK(local.device().is_cpu(), "get_total_norm: a reproducible norm needs tensors on ",
                  "the CPU, got one on ", local.device());
    }
  }
  const at::ScalarType dtype = has_double ? at::kDouble : at::kFloat;
  // A maximum, a minimum and a number are exact as they are.
  if (std::isinf(p) || p == 0) return plain_norm(layout, options).to(dtype);
  const ExactSum sum = whole_sum(layout, options);
  const FloatFormat& format = has_double ? kFloat64 : kFloat32;
  double norm = 0;
  if (p == 1) {
    norm = sum.value(format);
  } else if (p == 2) {
    norm = sum.root(format);
  } else {
    norm = std::pow(sum.value(kFloat64), 1 / p);
  }
  return at::full({}, norm, at::TensorOptions(dtype));
}

}  // namespace

at::Tensor get_total_norm(const std::vector<at::Tensor>& tensors, const NormOptions& options) {
  TORCH_CHECK(!std::isnan(options.norm_type), "get_total_norm: norm_type is nan, must be a number");
  const at::NoGradGuard no_grad;
  if (tensors.empty() && options.stages == nullptr) return at::zeros({});
  const Layout layout = layout_of(tensors);
  at::Tensor total =
      options.reproducible ? exact_norm(layout, options) : plain_norm(layout, options);
  if (options.error_if_nonfinite) {
    const auto value = total.item<double>();
    TORCH_CHECK(
        std::isfinite(value), "get_total_norm: the norm of order ", options.norm_type,
        " of the tensors is ", value,
        "; gradients can't be clipped by it (error_if_nonfinite = false would scale by it)");
  }
  return total;
}

}  // namespace ppfsdp::optim
