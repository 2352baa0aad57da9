// Gradient norms and clipping of DTensors on any meshes, in any placements, equal those of the
// plain list: bit for bit in the reproducible mode, and within the bound of float arithmetic
// otherwise. A whole training run is then the same on any number of ranks, as far as its gradients
// are.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mv.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/accumulate.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "fmt/format.h"
#include "fmt/ranges.h"
#include "sim/mesh/world.h"
#include "src/comm/communicator.h"
#include "src/dtensor/dtensor.h"
#include "src/fsdp/fully_shard.h"
#include "src/nn/module.h"
#include "src/optim/adamw.h"
#include "src/optim/clip_grad_norm.h"
#include "src/optim/sgd.h"

namespace ppfsdp::proptests {
namespace {

using dtensor::Placement;
using dtensor::Placements;
using mesh::DeviceMesh;
using mesh::DeviceMeshPtr;
using Sizes = std::vector<int64_t>;
using Tensors = std::vector<at::Tensor>;

constexpr double kInf = std::numeric_limits<double>::infinity();

/// Evenly; RapidCheck by itself would draw small numbers first.
int64_t draw(int64_t low, int64_t high) {
  return *rc::gen::resize(100, rc::gen::inRange<int64_t>(low, high + 1));
}

template <typename T>
const T& choice(const std::vector<T>& all) {
  return all[static_cast<size_t>(draw(0, static_cast<int64_t>(all.size()) - 1))];
}

at::Tensor whole_numbers(const Sizes& sizes, int64_t low, int64_t high, uint64_t seed) {
  return at::randint(low, high + 1, sizes, at::detail::createCPUGenerator(seed), at::kFloat);
}

/// Where a tensor lies: a mesh of the case (see meshes_of) or none, and how.
struct Place {
  size_t mesh = 0;
  Placements placements;
};

enum MeshKind : size_t { kPlain, kWhole, kFirstDim, kLastDim, kLine };

/// One list of gradients and how it is clipped, drawn whole.
struct ClipCase {
  Sizes mesh;
  std::vector<Sizes> sizes;
  std::vector<at::ScalarType> dtypes;
  std::vector<Place> places;
  double p = 2;
  double max_norm = 1;
  bool foreach = true;
  bool zeros = false;
  uint64_t seed = 0;
  sim::WorldOptions world;

  int world_size() const {
    int64_t product = 1;
    for (const int64_t size : mesh) product *= size;
    return static_cast<int>(product);
  }

  std::string str() const {
    std::string text = fmt::format(
        "mesh [{}], p {}, max_norm {}, foreach {}, zeros {}, seed {}, schedule {} seed {}, order "
        "{}",
        fmt::join(mesh, ", "), p, max_norm, foreach, zeros, seed, static_cast<int>(world.schedule),
        world.seed, comm::to_string(world.order));
    static const std::vector<std::string> names = {"plain", "mesh", "dim a", "dim b", "line"};
    for (size_t i = 0; i < sizes.size(); ++i) {
      text += fmt::format("; {} [{}] on {} {}", c10::toString(dtypes[i]), fmt::join(sizes[i], ", "),
                          names[places[i].mesh], to_string(places[i].placements));
    }
    return text;
  }

  /// Multiples of 1/64 up to 64, so that no power that is taken here overflows or is subnormal, and
  /// zeros if the case has them.
  Tensors gradients() const {
    Tensors made;
    for (size_t i = 0; i < sizes.size(); ++i) {
      at::Tensor values = whole_numbers(sizes[i], 1, 4096, seed + 2 * i) / 64;
      values = values * (whole_numbers(sizes[i], 0, 1, seed + 2 * i + 1) * 2 - 1);
      if (zeros) values = values * whole_numbers(sizes[i], 0, 1, seed + 1000 + i);
      made.push_back(values.to(dtypes[i]));
    }
    return made;
  }
};

/// The mesh, its submeshes, and a 1D mesh of the same ranks.
std::vector<DeviceMeshPtr> meshes_of(const ClipCase& c, comm::Runtime& runtime) {
  if (c.mesh.size() == 1) {
    const DeviceMeshPtr mesh = DeviceMesh::create(runtime, c.mesh, {"a"});
    return {nullptr, mesh, mesh, mesh, mesh};
  }
  const DeviceMeshPtr mesh = DeviceMesh::create(runtime, c.mesh, {"a", "b"});
  return {nullptr, mesh, mesh->submesh({"a"}), mesh->submesh({"b"}),
          DeviceMesh::create(runtime, {c.world_size()}, {"line"})};
}

Placements draw_placements(size_t mesh_ndim, int64_t ndim, const Sizes& mesh) {
  Placements placements;
  for (size_t i = 0; i < mesh_ndim; ++i) {
    const int64_t kind = draw(0, 9);
    if (kind == 0) {
      placements.push_back(Placement::partial());
    } else if (kind > 2 && ndim > 0) {
      placements.push_back(Placement::shard(draw(0, ndim - 1)));
    } else {
      placements.push_back(Placement::replicate());
    }
  }
  if (mesh_ndim == 2 && placements[1].is_shard() && draw(0, 2) == 0) {
    placements[0] = Placement::strided_shard(placements[1].dim(), mesh[1]);
  }
  return placements;
}

ClipCase draw_clip_case() {
  ClipCase c;
  if (draw(0, 1) == 0) {
    c.mesh = {draw(1, 16)};
  } else {
    c.mesh = {draw(1, 4), draw(1, 4)};
  }
  // All on one mesh, or on any.
  const bool mixed = draw(0, 1) == 0;
  const std::vector<at::ScalarType> dtypes =
      choice<std::vector<at::ScalarType>>({{at::kFloat},
                                           {at::kFloat},
                                           {at::kBFloat16},
                                           {at::kHalf},
                                           {at::kFloat, at::kBFloat16},
                                           {at::kFloat, at::kDouble}});
  for (int64_t count = draw(1, 6); count > 0; --count) {
    Sizes sizes;
    for (int64_t ndim = draw(0, 3); ndim > 0; --ndim)
      sizes.push_back(draw(0, 9) == 0 ? 0 : draw(1, 9));
    Place place;
    place.mesh = mixed ? static_cast<size_t>(draw(kPlain, kLine)) : size_t{kWhole};
    if (place.mesh != kPlain) {
      place.placements = draw_placements(place.mesh == kWhole ? c.mesh.size() : 1,
                                         static_cast<int64_t>(sizes.size()), c.mesh);
    }
    c.sizes.push_back(sizes);
    c.dtypes.push_back(choice(dtypes));
    c.places.push_back(place);
  }
  c.p = choice<double>({2, 2, 1, 3, 2.5, 0.5, kInf, -kInf, 0, -1});
  // Else the plain list's norm itself is beyond float16, or so small that it has few digits.
  if (dtypes.front() == at::kHalf && c.p != 0 && std::abs(c.p) < 2) c.p = 2;
  c.max_norm = choice<double>({0.01, 1, 30, 1e6});
  c.foreach = draw(0, 1) == 0;
  c.zeros = draw(0, 3) == 0;
  c.seed = static_cast<uint64_t>(draw(0, 1000000));
  c.world.seed = static_cast<uint64_t>(draw(0, 1000000));
  c.world.schedule = choice<sim::Schedule>(
      {sim::Schedule::kRoundRobin, sim::Schedule::kRandom, sim::Schedule::kLazy});
  c.world.order = choice<comm::ReductionOrder>(
      {comm::ReductionOrder::kRankOrder, comm::ReductionOrder::kGlooRing,
       comm::ReductionOrder::kNcclRing, comm::ReductionOrder::kTree});
  return c;
}

/// The norm in double by its definition, which is exact beside what it is compared with.
double norm_in_double(const Tensors& gradients, double p) {
  double sum = p == -kInf ? kInf : 0;
  double count = 0;
  for (const at::Tensor& gradient : gradients) {
    const at::Tensor values = gradient.to(at::kDouble).abs().flatten();
    bool some = false;
    for (int64_t i = 0; i < values.numel(); ++i) {
      const double x = values.const_data_ptr<double>()[i];
      some = some || x != 0;
      if (p == kInf) sum = std::max(sum, x);
      if (p == -kInf) sum = std::min(sum, x);
      if (std::isfinite(p) && p != 0) sum += std::pow(x, p);
    }
    count += some ? 1 : 0;
  }
  if (p == 0) return count;  // as Python: of tensors with an element that is not 0
  return std::isinf(p) ? sum : std::pow(sum, 1 / p);
}

/// How far the plain norm may be from the true one, relative to it. The terms |x|^p are of one
/// sign, so that relative errors of sums are at most those of their terms, and one of u for each
/// addition, in whatever order. With u the unit roundoff of the least precise dtype and v of what
/// LibTorch accumulates in (float for bfloat16), to first order:
/// - a power is right to 2u, a sum of n terms adds (n - 1) v, and a root divides the error of what
///   is under it by |p|, adds 2u, and u |ln norm| since the exponent 1/p is rounded too;
/// - a tensor's own norm is one sum and root, each group of ranks adds a power, a sum over its
/// ranks
///   in the norms' dtype and a root, and the norm of norms is one sum and root again.
double relative_bound(const ClipCase& c) {
  double u = 0x1p-53;
  double v = 0x1p-53;
  int64_t most_elements = 1;
  for (size_t i = 0; i < c.sizes.size(); ++i) {
    if (c.dtypes[i] != at::kDouble) u = std::max(u, c.dtypes[i] == at::kFloat ? 0x1p-24 : 0x1p-9);
    if (c.dtypes[i] != at::kDouble) v = 0x1p-24;
    most_elements = std::max(most_elements, c10::multiply_integers(c.sizes[i]));
  }
  const double p = std::abs(c.p);
  const auto elements = static_cast<double>(most_elements);
  const auto tensors = static_cast<double>(c.sizes.size());
  const double groups = c.mesh.size() == 1 ? 1 : 3;
  const double root = 2 + std::log(64.0) + std::log(elements * tensors) / p;
  const double error = (elements + tensors) * v / p + (2 / p + root) * u +
                       groups * ((c.world_size() + 2) / p + root) * u + (2 / p + root) * u;
  // Higher orders: (1 + e)^k - 1 <= k e / (1 - k e).
  return error / std::max(1 - error, 0.1);
}

struct Coverage {
  int cases = 0;
  int clipped = 0;
  int kept = 0;
  int several_meshes = 0;
  int empty_shards = 0;
  int rounded = 0;  ///< the plain norm is not the reproducible one
};

/// Leaves with `gradients`.
Tensors parameters_with(const Tensors& gradients) {
  Tensors parameters;
  for (const at::Tensor& gradient : gradients) {
    parameters.push_back(at::zeros_like(gradient).requires_grad_());
    parameters.back().mutable_grad() = gradient;
  }
  return parameters;
}

void require(bool condition, const std::string& message) {
  if (!condition) throw std::runtime_error(message);
}

/// Equal bits; all NaN alike.
bool same(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

/// The groups that some tensor is split along, by their ranks, with how many collectives each has
/// seen.
std::vector<std::pair<std::vector<int>, uint64_t>> groups_in_use(
    const ClipCase& c, const std::vector<DeviceMeshPtr>& meshes, bool split) {
  std::vector<std::pair<std::vector<int>, uint64_t>> groups;
  std::vector<comm::Communicator*> seen;
  for (size_t i = 0; i < c.sizes.size(); ++i) {
    const DeviceMeshPtr& mesh = meshes[c.places[i].mesh];
    for (int64_t dim = 0; mesh != nullptr && dim < mesh->ndim(); ++dim) {
      comm::Communicator& group = mesh->communicator(dim);
      if (split && (mesh->size(dim) == 1 || !dtensor::splits(c.places[i].placements[dim])))
        continue;
      if (std::ranges::count(seen, &group) > 0) continue;
      seen.push_back(&group);
      auto known =
          std::ranges::find(groups, group.ranks(), &std::pair<std::vector<int>, uint64_t>::first);
      if (known == groups.end()) known = groups.insert(known, {group.ranks(), 0});
      known->second += group.sequence();
    }
  }
  return groups;
}

uint64_t total_of(const std::vector<std::pair<std::vector<int>, uint64_t>>& groups) {
  uint64_t total = 0;
  for (const auto& group : groups) total += group.second;
  return total;
}

/// One rank's part of the claim.
void check_rank(const ClipCase& c, comm::Runtime& runtime, double true_norm, double exact_norm,
                Coverage& coverage) {
  const std::vector<DeviceMeshPtr> meshes = meshes_of(c, runtime);
  const Tensors plain = c.gradients();
  for (const bool reproducible : {false, true}) {
    Tensors sharded;
    for (size_t i = 0; i < plain.size(); ++i) {
      const DeviceMeshPtr& mesh = meshes[c.places[i].mesh];
      sharded.push_back(mesh == nullptr
                            ? plain[i].clone()
                            : dtensor::distribute_tensor(plain[i], mesh, c.places[i].placements));
      coverage.empty_shards +=
          mesh != nullptr && plain[i].numel() > 0 && dtensor::local_of(sharded.back()).numel() == 0;
    }
    const uint64_t before = total_of(groups_in_use(c, meshes, false));
    const at::Tensor norm = optim::clip_grad_norm_(
        parameters_with(sharded), c.max_norm,
        {.norm_type = c.p, .foreach = c.foreach, .reproducible = reproducible});
    const uint64_t issued = total_of(groups_in_use(c, meshes, false)) - before;
    uint64_t needed = groups_in_use(c, meshes, true).size();
    // A partial gradient has a reduction of its own.
    for (const at::Tensor& tensor : sharded) {
      if (!dtensor::is_dtensor(tensor) || dtensor::local_of(tensor).numel() == 0) continue;
      const dtensor::Spec& spec = *dtensor::spec_of(tensor);
      for (int64_t dim = 0; dim < spec.mesh->ndim(); ++dim) {
        needed += spec.placements[dim].is_partial() && spec.mesh->size(dim) > 1;
      }
    }
    require(issued == needed,
            fmt::format("{} collectives instead of {}: one for each group of ranks "
                        "and for each partial gradient",
                        issued, needed));
    require(!dtensor::is_dtensor(norm) && norm.dim() == 0, "the norm is not a plain number");

    const auto value = norm.item<double>();
    const std::string mode = reproducible ? "reproducible" : "plain";
    if (reproducible || std::isinf(c.p) || c.p == 0) {
      const double wanted = reproducible ? exact_norm : true_norm;
      require(same(value, wanted), fmt::format("the {} norm is {}, not {}", mode, value, wanted));
    } else {
      require(same(value, true_norm) ||
                  std::abs(value - true_norm) <= relative_bound(c) * std::abs(true_norm),
              fmt::format("the {} norm is {}, {} off, {} allowed", mode, value,
                          std::abs(value / true_norm - 1), relative_bound(c)));
      coverage.rounded += value != exact_norm;
    }

    // The same factor on every element: clipping the plain list by this norm gives the same bits.
    const Tensors wanted = c.gradients();
    optim::clip_grads_with_norm_(parameters_with(wanted), c.max_norm, norm, c.foreach);
    for (size_t i = 0; i < sharded.size(); ++i) {
      const at::Tensor whole =
          dtensor::is_dtensor(sharded[i]) ? dtensor::full_tensor(sharded[i]) : sharded[i];
      require(whole.scalar_type() == wanted[i].scalar_type() && at::equal(whole, wanted[i]),
              fmt::format("the clipped gradient {} differs from the plain one's", i));
    }
    if (runtime.rank() == 0 && reproducible) {
      const bool clips = value > c.max_norm;
      ++coverage.cases;
      coverage.clipped += clips;
      coverage.kept += value < c.max_norm && value > 0;
      coverage.several_meshes +=
          c.mesh.size() == 2 && std::ranges::any_of(c.places, [&](auto& place) {
            return place.mesh != c.places[0].mesh;
          });
      bool changed = false;
      for (size_t i = 0; i < plain.size(); ++i) {
        changed = changed || !at::equal(wanted[i], plain[i]);
      }
      // Unless the 1e-6 that is added to the norm takes it past the limit.
      require(!changed || value > c.max_norm * (1 - 1e-5),
              "gradients within the limit were scaled");
    }
  }
}

// It fails for a norm of local shards, one taken twice over replicas or submeshes, a partial one
// that is returned, a tensor of another mesh left out, clipping on some ranks only, eps added to a
// partial norm, an empty shard that spoils an extreme, a collective too many, and for an exact sum
// that is not.
TEST(ClipProperty, ClippingShardsIsClippingTheWhole) {
  Coverage coverage;
  const bool held = rc::check("clipping shards is clipping the whole", [&] {
    const ClipCase c = draw_clip_case();
    RC_LOG() << "replay: " << c.str() << "\n";
    const Tensors plain = c.gradients();
    const double true_norm = norm_in_double(plain, c.p);
    const auto exact_norm =
        optim::get_total_norm(plain, {.norm_type = c.p, .reproducible = true}).item<double>();
    sim::run_world(c.world_size(), c.world, [&](comm::Runtime& runtime) {
      check_rank(c, runtime, true_norm, exact_norm, coverage);
    });
    // The exact norm of the plain list is itself right: two roundings to float32 from the true one.
    if (std::isfinite(true_norm)) {
      RC_ASSERT(std::abs(exact_norm - true_norm) <= std::abs(true_norm) * 0x1p-22);
    }
  });
  EXPECT_TRUE(held);
  // The cases must have been worth drawing.
  EXPECT_GT(coverage.clipped, coverage.cases / 3);
  EXPECT_GT(coverage.kept, coverage.cases / 10);
  EXPECT_GT(coverage.several_meshes, coverage.cases / 10);
  EXPECT_GT(coverage.empty_shards, coverage.cases / 4);
  EXPECT_GT(coverage.rounded, coverage.cases / 4);
}

/// A model whose loss is linear in its parameters, with whole-numbered coefficients: gradients are
/// whole numbers, and their sums exact in every order.
struct LinearLossImpl : nn::Module {
  explicit LinearLossImpl(const std::vector<Sizes>& sizes) : weights(sizes.size()) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      register_parameter(fmt::format("w{}", i), weights[i], at::ones(sizes[i]));
    }
  }
  /// x: [rows, number of elements].
  at::Tensor forward(const at::Tensor& x) {
    Tensors flat;
    for (const at::Tensor& weight : weights) flat.push_back(weight.flatten());
    return at::mv(x, at::cat(flat)).sum();
  }
  std::vector<at::Tensor> weights;
};
PPFSDP_MODULE(LinearLoss);

struct RunCase {
  std::vector<Sizes> sizes;
  double p = 2;
  double max_norm = 1;
  bool adamw = true;
  uint64_t seed = 0;
  int world = 1;

  int64_t elements() const {
    int64_t total = 0;
    for (const Sizes& own : sizes) total += c10::multiply_integers(own);
    return total;
  }
  std::string str() const {
    std::string text = fmt::format("world {}, p {}, max_norm {}, {}, seed {}", world, p, max_norm,
                                   adamw ? "adamw" : "sgd", seed);
    for (const Sizes& own : sizes) text += fmt::format(", [{}]", fmt::join(own, ", "));
    return text;
  }
};

/// Norms of every step and parameters at the end, of 3 steps on `world` ranks that share out 16
/// rows a step.
std::pair<std::vector<double>, Tensors> train(const RunCase& c, int world, bool reproducible) {
  constexpr int64_t kRows = 16;
  std::vector<double> norms;
  Tensors parameters;
  sim::run_world(world, {.seed = c.seed}, [&](comm::Runtime& runtime) {
    LinearLoss model(c.sizes);
    fsdp::fully_shard(*model, {.mesh = DeviceMesh::create(runtime, {world})});
    std::unique_ptr<optim::Optimizer> optimizer;
    if (c.adamw) {
      optimizer = std::make_unique<optim::AdamW>(model->parameters());
    } else {
      optimizer = std::make_unique<optim::SGD>(model->parameters(), optim::SGDOptions{.lr = 0.1});
    }
    for (uint64_t step = 0; step < 3; ++step) {
      const at::Tensor rows = whole_numbers({kRows, c.elements()}, -9, 9, c.seed + step);
      const dtensor::ShardRange mine = dtensor::shard_range(kRows, world, runtime.rank());
      optimizer->zero_grad();
      // Times the world, which the average over it takes away again.
      (model(rows.narrow(0, mine.offset, mine.length)) * world).backward();
      const at::Tensor norm = optim::clip_grad_norm_(
          model->parameters(), c.max_norm, {.norm_type = c.p, .reproducible = reproducible});
      optimizer->step();
      if (runtime.rank() == 0) norms.push_back(norm.item<double>());
    }
    const at::NoGradGuard no_grad;
    for (const at::Tensor& parameter : model->parameters()) {
      const at::Tensor whole = dtensor::full_tensor(parameter);
      if (runtime.rank() == 0) parameters.push_back(whole.clone());
    }
  });
  return {norms, parameters};
}

bool equal(const std::pair<std::vector<double>, Tensors>& a,
           const std::pair<std::vector<double>, Tensors>& b) {
  return a.first == b.first &&
         std::ranges::equal(a.second, b.second, [](auto& x, auto& y) { return at::equal(x, y); });
}

// Given gradients that are the same on every number of ranks, which whole numbers are, everything
// after them is: the norm was the last sum whose order depended on it.
TEST(ClipProperty, TrainingIsTheSameOnAnyNumberOfRanks) {
  int cases = 0, plain_differs = 0, clipped = 0;
  const bool held = rc::check("training is the same on any number of ranks", [&] {
    RunCase c;
    for (int64_t count = draw(1, 4); count > 0; --count) {
      Sizes sizes;
      for (int64_t ndim = draw(1, 2); ndim > 0; --ndim) sizes.push_back(draw(1, 40));
      c.sizes.push_back(sizes);
    }
    c.p = choice<double>({2, 2, 1, 3, 2.5});
    c.max_norm = choice<double>({0.3, 10, 1e6});
    c.adamw = draw(0, 1) == 0;
    c.seed = static_cast<uint64_t>(draw(0, 1000000));
    c.world = static_cast<int>(draw(2, 16));
    RC_LOG() << "replay: " << c.str() << "\n";
    const auto one = train(c, 1, true);
    RC_ASSERT(equal(train(c, c.world, true), one));
    ++cases;
    clipped += one.first[0] > c.max_norm;
    plain_differs += !equal(train(c, c.world, false), train(c, 1, false));
  });
  EXPECT_TRUE(held);
  EXPECT_GT(clipped, cases / 3);
  // Without the exact sum the claim does not hold.
  EXPECT_GT(plain_differs, cases / 4);
}

}  // namespace
}  // namespace ppfsdp::proptests
