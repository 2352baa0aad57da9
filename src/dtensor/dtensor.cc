#include "src/dtensor/dtensor.h"

#include <ATen/core/Formatting.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/strides.h>
#include <torch/csrc/autograd/custom_function.h>

#include <sstream>

#include "fmt/format.h"
#include "fmt/ranges.h"
#include "src/comm/runtime.h"
#include "src/dtensor/dtensor_impl.h"
#include "src/dtensor/redistribute.h"

namespace ppfsdp::dtensor {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct SpecHolder : torch::CustomClassHolder {
  explicit SpecHolder(SpecPtr held) : spec(std::move(held)) {}
  SpecPtr spec;
};

constexpr const char* kSpec = "spec";

void save_spec(AutogradContext* context, const SpecPtr& spec) {
  context->saved_data[kSpec] = c10::IValue::make_capsule(c10::make_intrusive<SpecHolder>(spec));
}

SpecPtr saved_spec(AutogradContext* context) {
  return c10::static_intrusive_pointer_cast<SpecHolder>(context->saved_data[kSpec].toCapsule())
      ->spec;
}

/// The placements in which a gradient is handed on: the parts of a Partial each have all of it.
Placements gradient_placements(Placements placements) {
  for (Placement& placement : placements) {
    TORCH_CHECK(!placement.is_partial() || placement.partial_op() == Placement::PartialOp::kSum ||
                    placement.partial_op() == Placement::PartialOp::kAvg,
                "autograd: ", placement.str(),
                " is not linear in its parts; redistribute it "
                "before taking its local part");
    placement = placement.is_partial() ? Placement::replicate() : placement;
  }
  return placements;
}

/// Each part of an average counts for its share.
double share_of(const Spec& spec) {
  double share = 1;
  for (int64_t i = 0; i < spec.mesh->ndim(); ++i) {
    if (spec.placements[i].partial_op() == Placement::PartialOp::kAvg) {
      share /= static_cast<double>(spec.mesh->size(i));
    }
  }
  return share;
}

at::Tensor scaled(const at::Tensor& tensor, double factor) {
  return factor == 1 ? tensor : tensor.mul(factor);
}

void check_gradient(const char* function, const at::Tensor& gradient) {
  TORCH_CHECK(is_dtensor(gradient), function, ": the gradient of a DTensor must be a DTensor, got ",
              "a plain tensor of sizes ", gradient.sizes());
}

at::Tensor wrap(const at::Tensor& local, const SpecPtr& spec) {
  at::Tensor dtensor = make_dtensor(local.detach(), spec);
  static_cast<DTensorImpl*>(dtensor.unsafeGetTensorImpl())->share_local_version();
  return dtensor;
}

at::Tensor redistributed(const at::Tensor& dtensor, const Placements& placements) {
  const SpecPtr& spec = spec_of(dtensor);
  const at::Tensor& local = local_of(dtensor);
  at::Tensor moved =
      redistribute_local(local, spec->mesh, spec->sizes, spec->placements, placements);
  if (moved.is_alias_of(local) || !moved.is_contiguous()) {
    moved = moved.clone(at::MemoryFormat::Contiguous);
  }
  // Not from the strides of the part: of one column or none they would not say the same everywhere.
  return make_dtensor(moved, make_spec(spec->mesh, placements, spec->sizes,
                                       c10::contiguous_strides(spec->sizes), spec->dtype));
}

struct FromLocal : torch::autograd::Function<FromLocal> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& local, SpecPtr spec) {
    gradient_placements(spec->placements);
    save_spec(context, spec);
    return wrap(local, spec);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const SpecPtr spec = saved_spec(context);
    check_gradient("from_local", gradients[0]);
    const at::Tensor gradient =
        to_local(redistribute(gradients[0], gradient_placements(spec->placements)));
    return {scaled(gradient, share_of(*spec)), at::Tensor()};
  }
};

struct ToLocal : torch::autograd::Function<ToLocal> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& dtensor) {
    gradient_placements(spec_of(dtensor)->placements);
    save_spec(context, spec_of(dtensor));
    return local_of(dtensor).detach();
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const SpecPtr spec = saved_spec(context);
    return {
        from_local(gradients[0], spec->mesh, gradient_placements(spec->placements), spec->sizes)};
  }
};

struct Redistribute : torch::autograd::Function<Redistribute> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& dtensor,
                            Placements placements) {
    save_spec(context, spec_of(dtensor));
    return redistributed(dtensor, placements);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    check_gradient("redistribute", gradients[0]);
    // The gradient is that of the global value, which redistribution does not change; any placement
    // would be right, and the source's is the one in which it is used. A Partial source's is whole.
    Placements placements = saved_spec(context)->placements;
    for (Placement& placement : placements) {
      placement = placement.is_partial() ? Placement::replicate() : placement;
    }
    return {redistribute(gradients[0], placements), at::Tensor()};
  }
};

bool records(const at::Tensor& tensor) {
  return tensor.requires_grad() && at::GradMode::is_enabled();
}

/// A tensor's Partials have to give one value in whatever order the mesh dims are reduced, and to
/// be such as its dtype can be reduced by.
void check_partials(const char* function, const Placements& placements, at::ScalarType dtype) {
  using Op = Placement::PartialOp;
  const auto adds = [](const Placement& placement) {
    return placement.partial_op() == Op::kSum || placement.partial_op() == Op::kAvg;
  };
  const Placement* first = nullptr;
  for (const Placement& placement : placements) {
    if (!placement.is_partial()) {
      continue;
    }
    const bool extreme = placement.partial_op() == Op::kMax || placement.partial_op() == Op::kMin;
    TORCH_CHECK(dtype != at::kBool || extreme, function, ": ", placement.str(),
                " is not for Bool; use Partial(max), which is any, or Partial(min), which is all");
    TORCH_CHECK(extreme || placement.partial_op() == Op::kSum || !at::isIntegralType(dtype, false),
                function, ": ", placement.str(), " needs a floating-point dtype, got ", dtype);
    first = first == nullptr ? &placement : first;
    TORCH_CHECK(*first == placement || (adds(*first) && adds(placement)), function, ": ",
                to_string(placements),
                " mixes reductions, whose order would decide the value; use "
                "one kind of Partial (sum and avg go together)");
  }
}

void check_plain(const char* function, const at::Tensor& tensor, const mesh::DeviceMeshPtr& mesh) {
  TORCH_CHECK(mesh != nullptr, function, ": no mesh given");
  TORCH_CHECK(tensor.defined(), function, ": the tensor is undefined");
  TORCH_CHECK(!is_dtensor(tensor), function, ": the tensor is a DTensor already: ",
              tensor.defined() && is_dtensor(tensor) ? spec_of(tensor)->str() : "",
              "; use redistribute");
  TORCH_CHECK(tensor.layout() == at::kStrided, function, ": needs a dense tensor, got layout ",
              tensor.layout());
}

}  // namespace

bool is_dtensor(const at::Tensor& tensor) { return impl_of(tensor) != nullptr; }

const SpecPtr& spec_of(const at::Tensor& dtensor) {
  const DTensorImpl* impl = impl_of(dtensor);
  TORCH_CHECK(impl != nullptr, "spec_of: needs a DTensor, got ",
              dtensor.defined() ? "a plain tensor" : "an undefined tensor");
  return impl->spec();
}

const at::Tensor& local_of(const at::Tensor& dtensor) {
  const DTensorImpl* impl = impl_of(dtensor);
  TORCH_CHECK(impl != nullptr, "local_of: needs a DTensor, got ",
              dtensor.defined() ? "a plain tensor" : "an undefined tensor");
  return impl->local();
}

at::Tensor from_local(const at::Tensor& local, const mesh::DeviceMeshPtr& mesh,
                      const Placements& placements, c10::OptionalArrayRef<int64_t> global_sizes) {
  check_plain("from_local", local, mesh);
  const int64_t ndim = global_sizes ? static_cast<int64_t>(global_sizes->size()) : local.dim();
  TORCH_CHECK(ndim == local.dim(), "from_local: the local part has ", local.dim(),
              " dims, the global sizes ", global_sizes.value_or(c10::IntArrayRef()));
  const Placements checked = checked_placements("from_local", *mesh, placements, ndim);
  check_partials("from_local", checked, local.scalar_type());
  std::vector<int64_t> sizes = local.sizes().vec();
  if (global_sizes) {
    sizes = global_sizes->vec();
  } else {
    for (int64_t i = 0; i < mesh->ndim(); ++i) {
      if (splits(checked[i])) {
        sizes[checked[i].dim()] *= mesh->size(i);
      }
    }
  }
  const std::vector<int64_t> expected = local_sizes(sizes, *mesh, checked, mesh->coordinates());
  TORCH_CHECK(local.sizes() == c10::IntArrayRef(expected), "from_local: of global sizes ",
              c10::IntArrayRef(sizes), " in ", to_string(checked), " on ", mesh->str(),
              " the rank at ", c10::IntArrayRef(mesh->coordinates()), " holds ",
              c10::IntArrayRef(expected), ", got a local part of sizes ", local.sizes());
  std::vector<int64_t> strides = global_strides(sizes, local.sizes(), local.strides());
  if (local.is_contiguous()) {
    const auto contiguous = c10::contiguous_strides(sizes);
    strides.assign(contiguous.begin(), contiguous.end());
  }
  const SpecPtr spec = make_spec(mesh, checked, sizes, strides, local.scalar_type());
  return records(local) ? FromLocal::apply(local, spec) : wrap(local, spec);
}

at::Tensor distribute_tensor(const at::Tensor& tensor, const mesh::DeviceMeshPtr& mesh,
                             const Placements& placements) {
  check_plain("distribute_tensor", tensor, mesh);
  const Placements checked =
      checked_placements("distribute_tensor", *mesh, placements, tensor.dim());
  check_partials("distribute_tensor", checked, tensor.scalar_type());
  const Placements whole(mesh->ndim());
  if (records(tensor) && !tensor.is_leaf()) {
    return redistribute(from_local(tensor, mesh, whole), checked);
  }
  at::Tensor result;
  {
    const at::NoGradGuard no_grad;
    const SpecPtr spec =
        make_spec(mesh, whole, tensor.sizes(), tensor.strides(), tensor.scalar_type());
    result = redistributed(make_dtensor(tensor.detach(), spec), checked);
  }
  if (tensor.requires_grad() && tensor.is_leaf()) {
    result.requires_grad_();
    result.register_hook([checked](const at::Tensor& gradient) {
      check_gradient("distribute_tensor", gradient);
      return redistribute(gradient, checked);
    });
  }
  return result;
}

at::Tensor to_local(const at::Tensor& dtensor) {
  return records(dtensor) ? ToLocal::apply(dtensor) : local_of(dtensor).detach();
}

at::Tensor redistribute(const at::Tensor& dtensor, const Placements& placements) {
  const SpecPtr& spec = spec_of(dtensor);
  Placements checked = checked_placements("redistribute", *spec->mesh, placements, spec->ndim());
  check_partials("redistribute", checked, spec->dtype);
  if (checked == spec->placements) {
    return dtensor;
  }
  return records(dtensor) ? Redistribute::apply(dtensor, std::move(checked))
                          : redistributed(dtensor, checked);
}

at::Tensor full_tensor(const at::Tensor& dtensor) {
  return to_local(redistribute(dtensor, Placements(spec_of(dtensor)->mesh->ndim())));
}

void align_gradient(const at::Tensor& parameter) {
  at::Tensor& gradient = parameter.mutable_grad();
  if (!gradient.defined() || !is_dtensor(parameter)) {
    return;
  }
  TORCH_CHECK(is_dtensor(gradient), "align_gradient: the gradient of ", spec_of(parameter)->str(),
              " is a plain tensor of sizes ", gradient.sizes(),
              "; make it a DTensor with from_local or distribute_tensor");
  const at::NoGradGuard no_grad;
  gradient = redistribute(gradient, spec_of(parameter)->placements);
}

std::string to_string(const at::Tensor& dtensor) {
  const Spec& spec = *spec_of(dtensor);
  std::ostringstream text;
  text << fmt::format("DTensor(local=[{}] of {})\n", fmt::join(spec.local_sizes, ", "), spec.str())
       << local_of(dtensor);
  return text.str();
}

}  // namespace ppfsdp::dtensor
