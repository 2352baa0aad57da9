// Copies, fills, tensors made like another, and what leaves the world of tensors: item, equal.
#include <ATen/ops/full.h>

#include "src/dtensor/redistribute.h"
#include "src/dtensor/rules/pointwise.h"
#include "src/dtensor/sharding.h"

namespace ppfsdp::dtensor {
namespace {

/// The result is laid out as the first argument, which stays as it is.
Plan like_self(const Call& call, const Placements& placements) {
  Plan plan;
  plan.results.push_back({placements, call.sizes()});
  return plan;
}

Plan same_placements(const Call& call) { return like_self(call, call.self().spec->placements); }

/// A cast of partial sums is the sum of the casts only between floating point types (to rounding).
bool casts_sums(at::ScalarType from, at::ScalarType to) {
  return from == to || (at::isFloatingType(from) && at::isFloatingType(to));
}

Plan cast(const Call& call) {
  const c10::IValue& dtype = call.arg("dtype");
  const at::ScalarType from = call.self().spec->dtype;
  const at::ScalarType to = dtype.isNone() ? from : dtype.toScalarType();
  Plan plan = same_placements(call);
  if (!casts_sums(from, to)) {
    plan.inputs = {without_partials(call.self().spec->placements)};
    plan.results.front().placements = plan.inputs.front();
  }
  return plan;
}

/// zeros_like and its kin: fresh values, which are no one's partial sums.
Plan fresh_like(const Call& call) {
  return like_self(call, without_partials(call.self().spec->placements));
}

/// new_zeros and its kin: laid out as self if they have its sizes, else replicated.
Plan fresh_of_size(const Call& call) {
  const std::vector<int64_t> sizes = call.arg("size").toIntVector();
  const mesh::DeviceMesh& mesh = *call.mesh();
  Plan plan;
  plan.results.push_back({sizes == call.sizes() ? without_partials(call.self().spec->placements)
                                                : Placements(mesh.ndim()),
                          sizes});
  const std::vector<int64_t> local =
      local_sizes(sizes, mesh, plan.results.front().placements, mesh.coordinates());
  const size_t size = *call.find("size");
  const std::optional<size_t> stride = call.find("stride");
  plan.local = [sizes, local, size, stride](const LocalCall& call) {
    call.arg(size) = local;
    if (stride) {
      call.arg(*stride) = global_strides(local, sizes, call.arg(*stride).toIntVector());
    }
    call.call();
  };
  return plan;
}

/// The op's answer is yes where it is on every rank's part.
Plan every_rank(const Call& call) {
  Plan plan;
  call.mesh();
  if (call.operands()[0].spec->sizes != call.operands()[1].spec->sizes) {
    TORCH_CHECK(call.name() == "aten::equal", call.name(),
                ": the global sizes differ: ", call.str());
    plan.local = [](const LocalCall& local) { local.finish({false}); };
    return plan;
  }
  const Placements to = without_partials(call.self().spec->placements);
  plan.inputs = {to, to};
  plan.local = [to](const LocalCall& local) {
    const at::TensorOptions options =
        local.arg(0).toTensor().options().dtype(at::kInt).requires_grad(false);
    local.call();
    const at::Tensor all = at::full({1}, local.stack.back().toBool() ? 1 : 0, options);
    for (size_t i = 0; i < to.size(); ++i) {
      if (splits(to[i])) {
        reduce_along(all, *local.mesh, static_cast<int64_t>(i),
                     Placement::partial(Placement::PartialOp::kMin));
      }
    }
    local.stack.back() = all.item<int32_t>() != 0;
  };
  return plan;
}

Plan same_size(const Call& call) {
  Plan plan;
  const bool same = call.operands()[0].spec->sizes == call.operands()[1].spec->sizes;
  plan.local = [same](const LocalCall& local) { local.finish({same}); };
  return plan;
}

Plan whole(const Call& call) {
  Plan plan;
  plan.inputs = {Placements(call.mesh()->ndim())};
  return plan;
}

const RegisterRule kSame({"alias", "clone", "detach", "lift_fresh"}, {same_placements});
const RegisterRule kCast({"_to_copy"}, {cast});
const RegisterRule kLike({"empty_like", "full_like", "ones_like", "zeros_like"}, {fresh_like});
const RegisterRule kNew({"new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"},
                        {fresh_of_size});
Plan copy(const Call& call) {
  const bool linear = casts_sums(call.operands()[1].spec->dtype, call.operands()[0].spec->dtype);
  return pointwise(linear ? Linear::kUnary : Linear::kNo).plan(call);
}

const RegisterRule kCopy({"copy_"}, {copy, /*reads_arguments=*/false});
const RegisterRule kZero({"zero_"}, pointwise(Linear::kUnary));
const RegisterRule kFill({"fill_.Scalar", "fill_.Tensor"}, pointwise());
const RegisterRule kEqual({"allclose", "equal"}, {every_rank});
const RegisterRule kSameSize({"is_same_size"}, {same_size, /*reads_arguments=*/false});
const RegisterRule kItem({"_local_scalar_dense"}, {whole});

}  // namespace
}  // namespace ppfsdp::dtensor
