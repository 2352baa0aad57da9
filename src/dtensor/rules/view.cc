// Ops that rearrange dims. A view shares its memory, so nothing may be moved for it: a view of a
// dim that is split in a way the view cannot keep is an error. Ops that copy are moved instead.
#include <ATen/ops/alias.h>
#include <ATen/ops/squeeze.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "src/dtensor/rule.h"
#include "src/dtensor/sharding.h"

namespace ppfsdp::dtensor {
namespace {

/// dims[d]: the dim of the result that dim d of the input becomes; none where d is cut, folded or
/// dropped, so that it must be whole.
using DimMap = std::vector<std::optional<int64_t>>;

DimMap identity(int64_t ndim) {
  DimMap dims;
  for (int64_t dim = 0; dim < ndim; ++dim) {
    dims.push_back(dim);
  }
  return dims;
}

Placement on_dim(const Placement& placement, int64_t dim) {
  return placement.is_shard() ? Placement::shard(dim)
                              : Placement::strided_shard(dim, placement.split_factor());
}

/// Results of `sizes`, each laid out as the input with its dims mapped. Partial values stay
/// partial: rearranging commutes with every reduction. `copies`: the op copies, so what it needs
/// whole may be gathered; otherwise that is an error.
Plan map_dims(const Call& call, const DimMap& dims, const std::vector<std::vector<int64_t>>& sizes,
              bool copies = false) {
  Placements input = call.self().spec->placements;
  Placements result;
  for (Placement& placement : input) {
    if (!splits(placement)) {
      result.push_back(placement);
    } else if (const std::optional<int64_t> dim = dims[placement.dim()]) {
      result.push_back(on_dim(placement, *dim));
    } else {
      TORCH_CHECK(copies, call.name(), ": a view cannot keep ", placement.str(), " of ", call.str(),
                  "; redistribute the tensor first");
      placement = Placement::replicate();
      result.push_back(placement);
    }
  }
  // A StridedShard may have counted on a split that has gone.
  const std::vector<int64_t>& mesh_shape = call.self().spec->mesh->shape();
  input = with_fitting_splits(mesh_shape, std::move(input));
  result = with_fitting_splits(mesh_shape, std::move(result));
  Plan plan;
  plan.inputs = {input};
  for (const std::vector<int64_t>& own : sizes) {
    plan.results.push_back({result, own});
  }
  return plan;
}

/// Runs the op with argument `index` replaced by this rank's sizes of the result.
LocalFunction with_local_sizes(const Call& call, const Plan& plan, size_t index) {
  const Result& result = plan.results.front();
  const std::vector<int64_t> sizes =
      local_sizes(result.sizes, *call.mesh(), result.placements, call.mesh()->coordinates());
  return [sizes, index](const LocalCall& local) {
    local.arg(index) = sizes;
    local.call();
  };
}

int64_t product_of(c10::ArrayRef<int64_t> sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

/// `wanted` with its one -1 worked out.
std::vector<int64_t> whole_sizes(const Call& call, std::vector<int64_t> wanted) {
  const int64_t numel = product_of(call.sizes());
  int64_t known = 1;
  int64_t* open = nullptr;
  for (int64_t& size : wanted) {
    if (size == -1) {
      open = &size;
    } else {
      known *= size;
    }
  }
  if (open != nullptr && known > 0) {
    *open = numel / known;
  }
  TORCH_CHECK(product_of(wanted) == numel, call.name(), ": sizes ", c10::IntArrayRef(wanted),
              " do not fit the global sizes ", c10::IntArrayRef(call.sizes()));
  return wanted;
}

/// Dims of `from` and `to` in groups of equal product, as small as can be. The first dim of more
/// than one element in a group may stay split, if it becomes the first such dim of the group's
/// other side.
DimMap reshape_dims(const std::vector<int64_t>& from, const std::vector<int64_t>& to) {
  DimMap dims(from.size());
  size_t i = 0;
  size_t j = 0;
  while (i < from.size() && j < to.size()) {
    const size_t first = i;
    size_t lead = j;
    int64_t left = from[i++];
    int64_t right = to[j++];
    while (left != right) {
      if (left < right && i < from.size()) {
        left *= from[i++];
      } else if (j < to.size()) {
        right *= to[j++];
      } else {
        return dims;  // an empty tensor, whose dims do not pair
      }
    }
    size_t source = first;
    while (source + 1 < i && from[source] == 1) {
      ++source;
    }
    while (lead + 1 < j && to[lead] == 1) {
      ++lead;
    }
    dims[source] = static_cast<int64_t>(lead);
  }
  return dims;
}

/// On every rank the part of the input is, element for element, the part of the result.
bool parts_agree(const Call& call, const std::vector<int64_t>& to, const Placements& placements) {
  const Spec& from = *call.self().spec;
  const mesh::DeviceMesh& mesh = *from.mesh;
  const auto first_element = [](const std::vector<ShardRange>& ranges,
                                const std::vector<int64_t>& sizes) {
    int64_t offset = 0;
    for (size_t dim = 0; dim < sizes.size(); ++dim) {
      offset = offset * sizes[dim] + ranges[dim].offset;
    }
    return offset;
  };
  for (int64_t rank = 0; rank < mesh.size(); ++rank) {
    const std::vector<int64_t> coordinates = coordinates_of(mesh.shape(), rank);
    const auto source = local_ranges(from.sizes, mesh, from.placements, coordinates);
    const auto result = local_ranges(to, mesh, placements, coordinates);
    int64_t source_numel = 1;
    int64_t result_numel = 1;
    for (const ShardRange& range : source) {
      source_numel *= range.length;
    }
    for (const ShardRange& range : result) {
      result_numel *= range.length;
    }
    if (source_numel != result_numel ||
        (source_numel > 0 && first_element(source, from.sizes) != first_element(result, to))) {
      return false;
    }
  }
  return true;
}

Plan view(const Call& call, bool copies) {
  const std::vector<int64_t> sizes = whole_sizes(call, call.arg("size").toIntVector());
  Plan plan = map_dims(call, reshape_dims(call.sizes(), sizes), {sizes}, copies);
  if (!parts_agree(call, sizes, plan.results.front().placements)) {
    TORCH_CHECK(copies, call.name(), ": a view of sizes ", c10::IntArrayRef(sizes),
                " cannot keep the shards of ", call.str(),
                ", whose borders would move; redistribute the tensor first");
    plan = map_dims(call, DimMap(call.ndim()), {sizes}, copies);
  }
  plan.local = with_local_sizes(call, plan, *call.find("size"));
  return plan;
}

Plan transpose(const Call& call) {
  const int64_t ndim = call.ndim();
  DimMap dims = identity(ndim);
  std::vector<int64_t> sizes = call.sizes();
  const bool is_t = call.name() == "aten::t";
  TORCH_CHECK(!is_t || ndim <= 2, "t: at most 2 dims, got ", call.str());
  const int64_t a = is_t ? 0 : wrap_dim(call, call.arg("dim0").toInt(), ndim);
  const int64_t b = is_t ? ndim - 1 : wrap_dim(call, call.arg("dim1").toInt(), ndim);
  if (ndim > 0) {
    std::swap(dims[a], dims[b]);
    std::swap(sizes[a], sizes[b]);
  }
  return map_dims(call, dims, {sizes});
}

Plan permute(const Call& call) {
  const std::vector<int64_t> order = call.arg("dims").toIntVector();
  TORCH_CHECK(static_cast<int64_t>(order.size()) == call.ndim(), "permute: got ", order.size(),
              " dims for ", call.str());
  DimMap dims(order.size());
  std::vector<int64_t> sizes;
  for (size_t k = 0; k < order.size(); ++k) {
    const int64_t dim = wrap_dim(call, order[k], call.ndim());
    dims[dim] = static_cast<int64_t>(k);
    sizes.push_back(call.sizes()[dim]);
  }
  return map_dims(call, dims, {sizes});
}

Plan unsqueeze(const Call& call) {
  const int64_t dim = wrap_dim(call, call.arg("dim").toInt(), call.ndim() + 1);
  DimMap dims = identity(call.ndim());
  for (int64_t d = dim; d < call.ndim(); ++d) {
    dims[d] = d + 1;
  }
  std::vector<int64_t> sizes = call.sizes();
  sizes.insert(sizes.begin() + dim, 1);
  return map_dims(call, dims, {sizes});
}

/// Only dims of global size 1 go: a dim of which this rank happens to hold one element stays.
Plan squeeze(const Call& call) {
  std::vector<int64_t> wanted;
  if (!call.find("dim")) {
    wanted.resize(call.ndim());
    std::iota(wanted.begin(), wanted.end(), int64_t{0});
  } else if (call.arg("dim").isInt()) {
    wanted = {call.arg("dim").toInt()};
  } else {
    wanted = call.arg("dim").toIntVector();
  }
  std::vector<int64_t> gone;
  for (int64_t dim : wanted) {
    const int64_t wrapped = wrap_dim(call, dim, call.ndim());
    if (wrapped < call.ndim() && call.sizes()[wrapped] == 1) {
      gone.push_back(wrapped);
    }
  }
  DimMap dims(call.ndim());
  std::vector<int64_t> sizes;
  for (int64_t dim = 0; dim < call.ndim(); ++dim) {
    if (std::find(gone.begin(), gone.end(), dim) == gone.end()) {
      dims[dim] = static_cast<int64_t>(sizes.size());
      sizes.push_back(call.sizes()[dim]);
    }
  }
  Plan plan = map_dims(call, dims, {sizes});
  plan.local = [gone](const LocalCall& local) {
    const at::Tensor self = local.arg(0).toTensor();
    local.finish({gone.empty() ? at::alias(self) : at::squeeze(self, gone)});
  };
  return plan;
}

Plan expand(const Call& call) {
  std::vector<int64_t> sizes = call.arg("size").toIntVector();
  TORCH_CHECK(static_cast<int64_t>(sizes.size()) >= call.ndim(), "expand: ", sizes.size(),
              " sizes for ", call.str());
  const size_t lead = sizes.size() - call.sizes().size();
  DimMap dims(call.ndim());
  for (int64_t dim = 0; dim < call.ndim(); ++dim) {
    int64_t& size = sizes[lead + dim];
    size = size == -1 ? call.sizes()[dim] : size;
    TORCH_CHECK(size == call.sizes()[dim] || call.sizes()[dim] == 1, "expand: sizes ",
                c10::IntArrayRef(sizes), " do not fit ", call.str());
    if (size == call.sizes()[dim]) {
      dims[dim] = static_cast<int64_t>(lead) + dim;
    }
  }
  Plan plan = map_dims(call, dims, {sizes});
  plan.local = with_local_sizes(call, plan, *call.find("size"));
  return plan;
}

struct Cut {
  int64_t dim;
  int64_t length;
  bool whole;
};

/// What the arguments dim, start, end and step say of a dim of `size` elements.
Cut cut_of(const Call& call, int64_t ndim, const std::function<int64_t(int64_t dim)>& size_of) {
  const int64_t dim = existing_dim(call, call.arg("dim").toInt(), ndim);
  const int64_t size = size_of(dim);
  const auto clamped = [&](const c10::IValue& value, int64_t otherwise) {
    const int64_t index = value.isNone() ? otherwise : value.toInt();
    return std::clamp<int64_t>(index < 0 ? index + size : index, 0, size);
  };
  const int64_t start = clamped(call.arg("start"), 0);
  const int64_t end = std::max(start, clamped(call.arg("end"), size));
  const int64_t step = call.arg("step").toInt();
  TORCH_CHECK(step > 0, call.name(), ": the step must be positive, got ", step);
  return {dim, (end - start + step - 1) / step, start == 0 && end == size && step == 1};
}

Plan slice(const Call& call) {
  const Cut cut = cut_of(call, call.ndim(), [&](int64_t dim) { return call.sizes()[dim]; });
  DimMap dims = identity(call.ndim());
  std::vector<int64_t> sizes = call.sizes();
  sizes[cut.dim] = cut.length;
  if (!cut.whole) {
    dims[cut.dim].reset();
  }
  return map_dims(call, dims, {sizes});
}

DimMap without(int64_t ndim, int64_t dim) {
  DimMap dims = identity(ndim);
  dims[dim].reset();
  for (int64_t d = dim + 1; d < ndim; ++d) {
    dims[d] = d - 1;
  }
  return dims;
}

Plan select(const Call& call) {
  const int64_t dim = existing_dim(call, call.arg("dim").toInt(), call.ndim());
  std::vector<int64_t> sizes = call.sizes();
  sizes.erase(sizes.begin() + dim);
  return map_dims(call, without(call.ndim(), dim), {sizes});
}

Plan unbind(const Call& call) {
  const int64_t dim = existing_dim(call, call.arg("dim").toInt(), call.ndim());
  std::vector<int64_t> sizes = call.sizes();
  sizes.erase(sizes.begin() + dim);
  return map_dims(call, without(call.ndim(), dim),
                  std::vector<std::vector<int64_t>>(call.sizes()[dim], sizes));
}

Plan split(const Call& call) {
  const int64_t dim = existing_dim(call, call.arg("dim").toInt(), call.ndim());
  std::vector<int64_t> lengths;
  if (call.find("split_sizes")) {
    lengths = call.arg("split_sizes").toIntVector();
  } else {
    const int64_t step = call.arg("split_size").toInt();
    TORCH_CHECK(step > 0, "split: the size of a part must be positive, got ", step);
    int64_t left = call.sizes()[dim];
    do {
      lengths.push_back(std::min(step, left));
      left -= lengths.back();
    } while (left > 0);
  }
  DimMap dims = identity(call.ndim());
  if (lengths.size() > 1) {
    dims[dim].reset();
  }
  std::vector<std::vector<int64_t>> sizes(lengths.size(), call.sizes());
  for (size_t k = 0; k < lengths.size(); ++k) {
    sizes[k][dim] = lengths[k];
  }
  return map_dims(call, dims, sizes);
}

Plan slice_backward(const Call& call) {
  const std::vector<int64_t> sizes = call.arg("input_sizes").toIntVector();
  const Cut cut = cut_of(call, call.ndim(), [&](int64_t dim) { return sizes[dim]; });
  DimMap dims = identity(call.ndim());
  if (!cut.whole) {
    dims[cut.dim].reset();
  }
  Plan plan = map_dims(call, dims, {sizes}, /*copies=*/true);
  plan.local = with_local_sizes(call, plan, *call.find("input_sizes"));
  return plan;
}

Plan select_backward(const Call& call) {
  const std::vector<int64_t> sizes = call.arg("input_sizes").toIntVector();
  const int64_t dim = wrap_dim(call, call.arg("dim").toInt(), call.ndim() + 1);
  DimMap dims = identity(call.ndim());
  for (int64_t d = dim; d < call.ndim(); ++d) {
    dims[d] = d + 1;
  }
  Plan plan = map_dims(call, dims, {sizes}, /*copies=*/true);
  plan.local = with_local_sizes(call, plan, *call.find("input_sizes"));
  return plan;
}

const RegisterRule kView({"view"}, {[](const Call& call) { return view(call, false); }});
const RegisterRule kUnsafeView({"_unsafe_view"},
                               {[](const Call& call) { return view(call, true); }});
const RegisterRule kTranspose({"t", "transpose.int"}, {transpose});
const RegisterRule kPermute({"permute"}, {permute});
const RegisterRule kUnsqueeze({"unsqueeze"}, {unsqueeze});
const RegisterRule kSqueeze({"squeeze", "squeeze.dim", "squeeze.dims"}, {squeeze});
const RegisterRule kExpand({"expand"}, {expand});
const RegisterRule kSlice({"slice.Tensor"}, {slice});
const RegisterRule kSelect({"select.int"}, {select});
const RegisterRule kUnbind({"unbind.int"}, {unbind});
const RegisterRule kSplit({"split.Tensor", "split_with_sizes"}, {split});
const RegisterRule kSliceBackward({"slice_backward"}, {slice_backward});
const RegisterRule kSelectBackward({"select_backward"}, {select_backward});

}  // namespace
}  // namespace ppfsdp::dtensor
