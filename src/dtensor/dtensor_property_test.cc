// For random ops, shapes, meshes and placements: the op on DTensors, gathered, equals the op on the
// gathered tensors. Values are small integers, so that sums are exact and equality is bit for bit;
// where an op rounds, the tolerance stands with the op.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fmt/format.h"
#include "fmt/ranges.h"
#include "src/dtensor/dtensor.h"
#include "src/dtensor/testing.h"

namespace ppfsdp::dtensor {
namespace {

using Tensors = std::vector<at::Tensor>;
using Sizes = std::vector<int64_t>;
using Op = Placement::PartialOp;

/// How an op's operands have to fit together.
enum class Fit {
  kAny,          ///< one operand
  kBroadcast,    ///< each broadcasts to the first
  kMatrices,     ///< (m, k), (k, n)
  kAddMatrices,  ///< (n), (m, k), (k, n)
  kSame,
};

struct OpCase {
  const char* name;
  size_t arity;
  Fit fit;
  /// `dim` is a dim of the first operand.
  std::function<Tensors(const Tensors& x, int64_t dim)> run;
  /// Of the largest absolute value that can arise: the bound on the difference, in units of 2^-24.
  double ulps = 0;
};

int64_t middle(const at::Tensor& x, int64_t dim) { return x.size(dim) / 2; }

#define UNARY(name, expression)                                        \
  {                                                                    \
    name, 1, Fit::kAny, [](const Tensors& x, int64_t dim) -> Tensors { \
      [[maybe_unused]] const at::Tensor& a = x[0];                     \
      (void)dim;                                                       \
      return expression;                                               \
    }                                                                  \
  }
#define BINARY(name, expression)                                             \
  {                                                                          \
    name, 2, Fit::kBroadcast, [](const Tensors& x, int64_t dim) -> Tensors { \
      const at::Tensor& a = x[0];                                            \
      const at::Tensor& b = x[1];                                            \
      (void)dim;                                                             \
      return expression;                                                     \
    }                                                                        \
  }

const std::vector<OpCase>& ops() {
  static const auto* all = new std::vector<OpCase>{
      UNARY("neg", {-a}),
      UNARY("abs", {a.abs()}),
      UNARY("sqrt", {a.abs().sqrt()}),
      UNARY("reciprocal", {(a.abs() + 1).reciprocal()}),
      UNARY("square", {a.pow(2)}),
      UNARY("add scalar", {a + 3}),
      UNARY("mul scalar", {a * -2}),
      UNARY("div scalar", {a / 2}),
      UNARY("rsub", {1 - a}),
      UNARY("clamp", {a.clamp(-2, 1)}),
      UNARY("eq scalar", {a.eq(1)}),
      UNARY("isnan", {a.isnan()}),
      UNARY("isfinite", {a.isfinite()}),
      UNARY("relu", {at::relu(a)}),
      UNARY("where scalar", {at::where(a > 0, a, 2)}),
      UNARY("mul_ scalar", {a.clone().mul_(3)}),
      UNARY("add_ scalar", {a.clone().add_(3)}),
      UNARY("clamp_", {a.clone().clamp_(-1, 2)}),
      UNARY("zero_", {a.clone().zero_()}),
      UNARY("fill_", {a.clone().fill_(7)}),
      UNARY("mul by 0-dim", {a * a.sum()}),
      UNARY("double", {a.to(at::kDouble)}),
      UNARY("int", {a.to(at::kInt)}),
      UNARY("clone", {a.clone()}),
      UNARY("ones_like", {at::ones_like(a)}),
      UNARY("new_zeros", {a.new_zeros(a.sizes()) + 1}),
      UNARY("sum", {a.sum()}),
      UNARY("sum dim", {a.sum({dim})}),
      UNARY("sum keepdim", {a.sum({dim}, true)}),
      UNARY("max", {a.max()}),
      UNARY("min", {a.min()}),
      UNARY("amax dim", {a.amax({dim})}),
      UNARY("max dim", {std::get<0>(a.max(dim))}),
      UNARY("argmax", {a.argmax(dim)}),
      UNARY("any", {(a > 2).any()}),
      UNARY("all dim", {(a > -4).all(dim)}),
      UNARY("norm 1", {a.norm(1)}),
      UNARY("norm inf", {at::linalg_vector_norm(a, INFINITY)}),
      UNARY("cumsum", {a.cumsum(dim)}),
      UNARY("foreach mul, neg", {at::_foreach_mul(at::_foreach_neg(Tensors{a, a * 2}), 3)}),
      UNARY("foreach norm 1", {at::_foreach_norm(Tensors{a, a * 2}, 1)}),
      UNARY("transpose", {a.transpose(0, dim) * 1}),
      UNARY("t and back", {a.transpose(0, dim).contiguous().transpose(0, dim)}),
      UNARY("unsqueeze", {a.unsqueeze(dim)}),
      UNARY("squeeze", {a.squeeze()}),
      UNARY("squeeze dim", {a.squeeze(dim)}),
      UNARY("expand", {a.unsqueeze(dim).expand_as(at::stack({a, a}, dim)).clone()}),
      UNARY("slice", {a.slice(dim, 0, middle(a, dim))}),
      UNARY("slice and flatten", {a.slice(dim, 0, middle(a, dim)).reshape({-1})}),
      UNARY("every second, flatten", {a.slice(dim, 0, a.size(dim), 2).flatten() + 1}),
      UNARY("expand and flatten", {a.unsqueeze(dim).expand_as(at::stack({a, a}, dim)).flatten()}),
      UNARY("select and flatten", {a.select(dim, middle(a, dim)).flatten()}),
      UNARY("select", {a.select(dim, middle(a, dim))}),
      UNARY("split", {a.split(2, dim)}),
      UNARY("unbind", {a.unbind(dim)}),
      UNARY("flatten", {a.flatten()}),
      UNARY("unsafe flatten", {at::_unsafe_view(a.contiguous(), {a.numel()})}),
      UNARY("unflatten", {at::cat({a, a}, dim).unflatten(dim, {2, -1})}),
      {"norm 2", 1, Fit::kAny,
       [](const Tensors& x, int64_t) -> Tensors { return {x[0].norm(2)}; },
       /* each square root and square, and each sum of at most 8 ranks and 400 elements that are not
          exact: (1 + u)^16 at most */ 16},
      {"mean", 1, Fit::kAny, [](const Tensors& x, int64_t) -> Tensors { return {x[0].mean()}; },
       /* a division a rank and 7 additions */ 9},
      {"mean dim", 1, Fit::kAny,
       [](const Tensors& x, int64_t dim) -> Tensors { return {x[0].mean(dim)}; }, 9},
      BINARY("add", {a + b}),
      BINARY("add alpha", {a.add(b, 2)}),
      BINARY("sub", {a - b}),
      BINARY("mul", {a * b}),
      BINARY("div", {a / (b.gt(0) + 1)}),
      BINARY("maximum", {at::maximum(a, b)}),
      BINARY("less", {a < b}),
      BINARY("where", {at::where(a > b, a, b)}),
      BINARY("masked_fill", {a.masked_fill(b > 0, 5)}),
      BINARY("addcmul", {a.addcmul(b, b, 2)}),
      BINARY("add_", {a.clone().add_(b)}),
      BINARY("mul_", {a.clone().mul_(b)}),
      BINARY("sub_", {a.clone().sub_(b, 3)}),
      BINARY("copy_", {a.clone().copy_(b)}),
      BINARY("masked_fill_", {a.clone().masked_fill_(b > 0, 5)}),
      BINARY("addcmul_", {a.clone().addcmul_(b, b, 2)}),
      {"stack", 2, Fit::kSame,
       [](const Tensors& x, int64_t dim) -> Tensors { return {at::stack(x, dim)}; }},
      {"cat", 2, Fit::kSame,
       [](const Tensors& x, int64_t dim) -> Tensors { return {at::cat({x[0], x[1], x[0]}, dim)}; }},
      {"foreach addcmul", 2, Fit::kSame,
       [](const Tensors& x, int64_t) -> Tensors {
         const Tensors all = {x[0].clone(), x[1].clone()};
         at::_foreach_addcmul_(all, Tensors{x[1], x[0]}, x, 2);
         return all;
       }},
      {"equal", 2, Fit::kSame,
       [](const Tensors& x, int64_t) -> Tensors {
         return {at::scalar_tensor(at::equal(x[0], x[1])), at::scalar_tensor(at::equal(x[0], x[0]))};
       }},
      {"item", 1, Fit::kAny,
       [](const Tensors& x, int64_t) -> Tensors {
         return {at::scalar_tensor(x[0].sum().item<float>())};
       }},
      {"mm", 2, Fit::kMatrices,
       [](const Tensors& x, int64_t) -> Tensors { return {x[0].mm(x[1])}; }},
      {"addmm", 3, Fit::kAddMatrices,
       [](const Tensors& x, int64_t) -> Tensors { return {at::addmm(x[0], x[1], x[2])}; }},
  };
  return *all;
}

struct Case {
  Sizes mesh;
  size_t op = 0;
  int64_t dim = 0;
  uint64_t seed = 0;
  std::vector<Sizes> sizes;
  std::vector<Placements> placements;

  std::string str() const {
    std::string text = fmt::format("op '{}', dim {}, mesh [{}], seed {}", ops()[op].name, dim,
                                   fmt::join(mesh, ", "), seed);
    for (size_t k = 0; k < sizes.size(); ++k) {
      text += fmt::format(", [{}] {}", fmt::join(sizes[k], ", "), to_string(placements[k]));
    }
    return text;
  }
};

int64_t draw(int64_t low, int64_t high) { return *rc::gen::inRange<int64_t>(low, high + 1); }

Placements draw_placements(const Sizes& mesh, int64_t ndim) {
  Placements placements;
  for (size_t i = 0; i < mesh.size(); ++i) {
    const int64_t choice = draw(0, 2 + 2 * ndim);
    if (choice == 0) {
      placements.push_back(Placement::replicate());
    } else if (choice == 1) {
      placements.push_back(Placement::partial());
    } else if (choice == 2) {
      placements.push_back(Placement::partial(Op::kMax));
    } else {
      placements.push_back(Placement::shard((choice - 3) / 2));
    }
  }
  for (size_t i = mesh.size() - 1; i > 0; --i) {
    // As FSDP over tensor parallelism.
    if (placements[i].is_shard() && draw(0, 2) == 0) {
      placements[i - 1] = Placement::strided_shard(placements[i].dim(), mesh[i]);
      break;
    }
  }
  return placements;
}

/// By LibTorch's own convention: "add_", "masked_fill_".
bool writes(const OpCase& op) { return std::string_view(op.name).ends_with('_'); }

int64_t draw_size() { return draw(0, 9) == 0 ? 0 : draw(1, 7); }

Case draw_case() {
  static const std::vector<Sizes> meshes = {{1}, {2},    {3},    {4},    {5},    {6},      {7},
                                            {8}, {2, 2}, {2, 3}, {3, 2}, {1, 4}, {2, 2, 2}};
  Case drawn;
  drawn.mesh = meshes[draw(0, static_cast<int64_t>(meshes.size()) - 1)];
  drawn.op = static_cast<size_t>(draw(0, static_cast<int64_t>(ops().size()) - 1));
  drawn.seed = static_cast<uint64_t>(draw(0, 1000000));
  const OpCase& op = ops()[drawn.op];
  if (op.fit == Fit::kMatrices || op.fit == Fit::kAddMatrices) {
    const int64_t m = draw_size();
    const int64_t k = draw_size();
    const int64_t n = draw_size();
    if (op.fit == Fit::kAddMatrices) {
      drawn.sizes.push_back(draw(0, 1) == 0 ? Sizes{n} : Sizes{1, n});
    }
    drawn.sizes.push_back({m, k});
    drawn.sizes.push_back({k, n});
  } else {
    Sizes first;
    for (int64_t ndim = draw(0, 9) == 0 ? 0 : draw(1, 3); ndim > 0; --ndim) {
      first.push_back(draw_size());
    }
    drawn.sizes.push_back(first);
    for (size_t k = 1; k < op.arity; ++k) {
      Sizes other = first;
      if (op.fit == Fit::kBroadcast) {
        other.erase(other.begin(), other.begin() + draw(0, static_cast<int64_t>(other.size())));
        for (int64_t& size : other) {
          size = draw(0, 3) == 0 ? 1 : size;
        }
        if (!writes(op) && draw(0, 3) == 0) {
          std::swap(drawn.sizes[0], other);  // the first is the one that is broadcast
        }
      }
      drawn.sizes.push_back(other);
    }
  }
  drawn.dim = draw(0, std::max<int64_t>(static_cast<int64_t>(drawn.sizes[0].size()) - 1, 0));
  for (const Sizes& sizes : drawn.sizes) {
    drawn.placements.push_back(draw_placements(drawn.mesh, static_cast<int64_t>(sizes.size())));
  }
  return drawn;
}

/// `full` distributed, with parts of partial values that differ on every rank.
at::Tensor distributed(const at::Tensor& full, const mesh::DeviceMeshPtr& mesh,
                       const Placements& placements, uint64_t seed) {
  const at::Tensor dtensor = distribute_tensor(full, mesh, placements);
  const at::Tensor local = local_of(dtensor).clone();
  for (int64_t i = 0; i < mesh->ndim(); ++i) {
    if (!placements[i].is_partial()) {
      continue;
    }
    // The ranks that are reduced together draw from one family of seeds.
    uint64_t family = seed * 31 + static_cast<uint64_t>(i);
    for (int64_t j = 0; j < mesh->ndim(); ++j) {
      family = family * 17 + static_cast<uint64_t>(
                                 j == i || placements[j].is_replicate() ? 0 : mesh->coordinate(j));
    }
    const auto noise = [&](int64_t rank) {
      return testing::integers(local.sizes(),
                               family * 64 + static_cast<uint64_t>(rank % mesh->size(i)));
    };
    const int64_t rank = mesh->coordinate(i);
    if (placements[i].partial_op() == Op::kSum) {
      local.add_(noise(rank) - noise(rank + 1));  // adds up to nothing
    } else if (rank != 0) {
      local.sub_(noise(rank).abs());
    }
  }
  return from_local(local, mesh, placements, full.sizes());
}

/// A maximum of sums is no sum of maxima: with both kinds in one tensor only the order in which
/// redistribution reduces (last mesh dim first) gives the value, so such are left out.
bool mixes_partials(const Placements& placements) {
  bool sum = false;
  bool max = false;
  for (const Placement& placement : placements) {
    sum = sum || placement.partial_op() == Op::kSum;
    max = max || placement.partial_op() == Op::kMax;
  }
  return sum && max;
}

bool close(const at::Tensor& got, const at::Tensor& wanted, double ulps) {
  if (got.sizes() != wanted.sizes() || got.scalar_type() != wanted.scalar_type()) {
    return false;
  }
  // Relative to the largest value that any such element can have.
  const double bound = ulps * 0x1p-24 * 4 * 20;
  return wanted.numel() == 0 || at::allclose(got, wanted, 0, bound, /*equal_nan=*/true);
}

/// "" or what went wrong on some rank.
std::string failure_of(const Case& drawn) {
  const OpCase& op = ops()[drawn.op];
  Tensors plain;
  for (size_t k = 0; k < drawn.sizes.size(); ++k) {
    plain.push_back(testing::integers(drawn.sizes[k], drawn.seed + k));
  }
  Tensors wanted;
  try {
    wanted = op.run(plain, drawn.dim);
  } catch (const c10::Error&) {
    return "";  // no elements to fold, say
  }
  std::mutex mutex;
  std::string failure;
  const auto body = [&](const mesh::DeviceMeshPtr& mesh) {
    Tensors inputs;
    for (size_t k = 0; k < plain.size(); ++k) {
      inputs.push_back(distributed(plain[k], mesh, drawn.placements[k], drawn.seed + k));
    }
    Tensors outputs;
    try {
      outputs = op.run(inputs, drawn.dim);
    } catch (const c10::Error& error) {
      if (std::string(error.what()).find("cannot keep") != std::string::npos) {
        return;  // a view of shards that it would have to move, refused on every rank alike
      }
      throw;
    }
    for (size_t k = 0; k < outputs.size(); ++k) {
      const at::Tensor got = is_dtensor(outputs[k]) ? full_tensor(outputs[k]) : outputs[k];
      // Strides that differ by rank would part the ranks here.
      at::Tensor flat = at::_unsafe_view(outputs[k].contiguous(), {outputs[k].numel()});
      flat = is_dtensor(flat) ? full_tensor(flat) : flat;
      if (!testing::difference(flat, got.reshape({-1})).empty()) {
        const std::lock_guard<std::mutex> lock(mutex);
        failure = "flattened it is another tensor";
      }
      const std::string difference = testing::difference(got, wanted[k]);
      if (!difference.empty() && (op.ulps == 0 || !close(got, wanted[k], op.ulps))) {
        const std::lock_guard<std::mutex> lock(mutex);
        failure = difference;
      }
      if (is_dtensor(outputs[k]) && outputs[k].sizes() != wanted[k].sizes()) {
        const std::lock_guard<std::mutex> lock(mutex);
        failure = "global sizes are wrong";
      }
    }
  };
  try {
    testing::on_mesh(drawn.mesh, body);
  } catch (const std::exception& error) {
    failure = std::string(error.what()).substr(0, 600);
  }
  return failure;
}

RC_GTEST_PROP(DTensorProperty, an_op_commutes_with_gathering, ()) {
  const Case drawn = draw_case();
  for (const Placements& placements : drawn.placements) {
    RC_PRE(!mixes_partials(placements));
  }
  const std::string failure = failure_of(drawn);
  if (!failure.empty()) {
    RC_FAIL(drawn.str() + "\n" + failure);
  }
}

RC_GTEST_PROP(DTensorProperty, redistribution_keeps_the_value, ()) {
  Case drawn = draw_case();
  const Placements to = draw_placements(drawn.mesh, static_cast<int64_t>(drawn.sizes[0].size()));
  RC_PRE(!mixes_partials(drawn.placements[0]) && !mixes_partials(to));
  const at::Tensor full = testing::integers(drawn.sizes[0], drawn.seed);
  std::mutex mutex;
  std::string failure;
  testing::on_mesh(drawn.mesh, [&](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor dtensor = distributed(full, mesh, drawn.placements[0], drawn.seed);
    const std::string difference =
        testing::difference(full_tensor(redistribute(dtensor, to)), full);
    if (!difference.empty()) {
      const std::lock_guard<std::mutex> lock(mutex);
      failure = difference;
    }
  });
  if (!failure.empty()) {
    RC_FAIL(drawn.str() + " to " + to_string(to) + "\n" + failure);
  }
}

}  // namespace
}  // namespace ppfsdp::dtensor
