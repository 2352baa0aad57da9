#include "src/optim/total_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "sim/mesh/world.h"
#include "src/comm/communicator.h"
#include "src/dtensor/dtensor.h"
#include "src/dtensor/testing.h"

namespace ppfsdp::optim {
namespace {

using dtensor::distribute_tensor;
using dtensor::Placement;
using dtensor::testing::kP;
using dtensor::testing::kR;
using dtensor::testing::normals;
using dtensor::testing::S;
using mesh::DeviceMesh;
using mesh::DeviceMeshPtr;
using ::testing::HasSubstr;

using Tensors = std::vector<at::Tensor>;

constexpr double kInf = std::numeric_limits<double>::infinity();

/// Runs `body` on every rank of a simulated mesh with dims called a, b, c.
void on_mesh(const std::vector<int64_t>& shape,
             const std::function<void(const DeviceMeshPtr& mesh)>& body) {
  int64_t world = 1;
  for (const int64_t size : shape) world *= size;
  const std::vector<std::string> names = {"a", "b", "c"};
  sim::run_world(static_cast<int>(world), {}, [&](comm::Runtime& runtime) {
    body(DeviceMesh::create(runtime, shape,
                            {names.begin(), names.begin() + static_cast<int64_t>(shape.size())}));
  });
}

/// How many collectives `fn` issues on each of the groups.
std::vector<uint64_t> collectives(const std::vector<comm::Communicator*>& groups,
                                  const std::function<void()>& fn) {
  std::vector<uint64_t> counts;
  counts.reserve(groups.size());
  for (const comm::Communicator* group : groups) counts.push_back(group->sequence());
  fn();
  for (size_t i = 0; i < groups.size(); ++i) counts[i] = groups[i]->sequence() - counts[i];
  return counts;
}

std::vector<uint64_t> collectives(const DeviceMeshPtr& mesh, const std::function<void()>& fn) {
  std::vector<comm::Communicator*> groups;
  for (int64_t dim = 0; dim < mesh->ndim(); ++dim) groups.push_back(&mesh->communicator(dim));
  return collectives(groups, fn);
}

using Counts = std::vector<uint64_t>;

/// Two roundings of a handful of values in float32, and another order of adding them up.
void expect_close(const at::Tensor& got, const at::Tensor& wanted) {
  EXPECT_EQ(got.scalar_type(), wanted.scalar_type());
  EXPECT_EQ(got.dim(), 0);
  EXPECT_FALSE(dtensor::is_dtensor(got));
  const double value = wanted.item<double>();
  if (std::isfinite(value)) {
    EXPECT_NEAR(got.item<double>(), value, std::abs(value) * 1e-6);
  } else {
    EXPECT_EQ(got.item<double>(), value);
  }
}

/// For every p, whether reproducible or not.
void for_all_norms(const std::function<void(const NormOptions& options)>& body) {
  for (const double p : {2.0, 1.0, 3.0, 2.5, 0.5, kInf, -kInf, 0.0, -1.0}) {
    for (const bool foreach : {false, true}) {
      body({.norm_type = p, .foreach = foreach});
    }
    body({.norm_type = p, .reproducible = true});
  }
}

const std::vector<std::vector<int64_t>> kSizes = {{5, 7}, {}, {9, 4}, {1, 3}, {8}};

/// Without zeros, so that norms of p <= 0 say something.
Tensors tensors() {
  Tensors made;
  uint64_t seed = 1;
  for (const auto& sizes : kSizes) made.push_back(normals(sizes, seed++));
  return made;
}

// A norm of local shards only, or one taken twice over replicas, would differ from the whole's;
// more than one all-reduce a dim would show in the counts.
TEST(TotalNorm, OneAllReduceAMeshDimMakesTheNormsOfAllTensorsWhole) {
  const std::vector<std::pair<dtensor::Placements, Counts>> uniform = {
      {{S(0), S(1)}, {1, 1}}, {{kR, S(0)}, {0, 1}},
      {{S(0), kR}, {1, 0}},   {{kR, kR}, {0, 0}},
      {{S(0), S(0)}, {1, 1}}, {{Placement::strided_shard(0, 3), S(0)}, {1, 1}},
  };
  on_mesh({2, 3}, [&](const DeviceMeshPtr& mesh) {
    const Tensors plain = tensors();
    for_all_norms([&](const NormOptions& options) {
      const at::Tensor wanted = get_total_norm(plain, options);
      for (const auto& [placements, wanted_counts] : uniform) {
        Tensors sharded;
        for (const at::Tensor& tensor : plain) {
          dtensor::Placements own = placements;
          for (Placement& placement : own) {
            if (dtensor::splits(placement) && placement.dim() >= tensor.dim()) placement = kR;
          }
          sharded.push_back(distribute_tensor(tensor, mesh, own));
        }
        at::Tensor norm;
        EXPECT_EQ(collectives(mesh, [&] { norm = get_total_norm(sharded, options); }),
                  wanted_counts);
        if (options.reproducible) {
          EXPECT_EQ(norm.item<double>(), wanted.item<double>());
        }
        expect_close(norm, wanted);
      }
    });
  });
}

// Also for tensors that lie differently: still one all-reduce a dim.
TEST(TotalNorm, PlacementsMayDiffer) {
  on_mesh({2, 2}, [](const DeviceMeshPtr& mesh) {
    const Tensors plain = tensors();
    const Tensors sharded = {distribute_tensor(plain[0], mesh, {S(0), S(1)}),
                             distribute_tensor(plain[1], mesh, {kR, kR}),
                             distribute_tensor(plain[2], mesh, {S(1), kR}),
                             distribute_tensor(plain[3], mesh, {kR, S(0)}),  // one shard is empty
                             plain[4]};
    for_all_norms([&](const NormOptions& options) {
      at::Tensor norm;
      EXPECT_EQ(collectives(mesh, [&] { norm = get_total_norm(sharded, options); }),
                (Counts{1, 1}));
      expect_close(norm, get_total_norm(plain, options));
    });
  });
}

// An empty shard has no greatest or least element; taken for 0 it would spoil a minimum.
TEST(TotalNorm, EmptyShardsAndEmptyTensorsHaveNoShare) {
  on_mesh({4}, [](const DeviceMeshPtr& mesh) {
    const Tensors plain = {normals({2, 3}, 1), normals({1}, 2), at::zeros({0, 5})};
    for_all_norms([&](const NormOptions& options) {
      Tensors sharded;
      for (const at::Tensor& tensor : plain) {
        sharded.push_back(distribute_tensor(tensor, mesh, {S(0)}));
      }
      const at::Tensor norm = get_total_norm(sharded, options);
      expect_close(norm, get_total_norm(plain, options));
      if (options.norm_type != 0) {
        expect_close(norm, get_total_norm({plain[0], plain[1]}, options));
      }
    });
  });
}

TEST(TotalNorm, PartialTensorsAreReducedFirst) {
  on_mesh({2}, [](const DeviceMeshPtr& mesh) {
    const at::Tensor mine = at::full({3}, mesh->coordinate(0) == 0 ? 3.0 : 1.0);
    const Tensors tensors = {dtensor::from_local(mine, mesh, {kP})};  // 4 each
    for (const bool reproducible : {false, true}) {
      EXPECT_EQ(
          get_total_norm(tensors, {.norm_type = 1, .reproducible = reproducible}).item<double>(),
          12);
    }
  });
}

TEST(TotalNorm, NonFiniteElementsOfAnyShardReachEveryRank) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  on_mesh({3}, [&](const DeviceMeshPtr& mesh) {
    for (const double bad : {kInf, -kInf, nan}) {
      for (const int64_t where : {0, 4, 7}) {
        at::Tensor plain = normals({8}, 1);
        plain[where] = bad;
        const Tensors sharded = {distribute_tensor(plain, mesh, {S(0)})};
        for_all_norms([&](const NormOptions& options) {
          const auto norm = get_total_norm(sharded, options).item<double>();
          const auto wanted = get_total_norm({plain}, options).item<double>();
          if (std::isfinite(wanted)) {
            EXPECT_NEAR(norm, wanted, wanted * 1e-6);
          } else {
            EXPECT_EQ(std::isnan(norm), std::isnan(wanted)) << options.norm_type;
            EXPECT_EQ(std::isinf(norm), std::isinf(wanted)) << options.norm_type;
          }
        });
      }
    }
  });
}

// The parent's mesh, its submeshes and a mesh of another shape in one list, and plain tensors: a
// tensor on a submesh must not count again along the other dims. `a` and `b` of parent and submesh
// are one group each, so there is one all-reduce for both.
TEST(TotalNorm, SeveralMeshesInOneList) {
  on_mesh({2, 3}, [](const DeviceMeshPtr& mesh) {
    const DeviceMeshPtr line = DeviceMesh::create(mesh->runtime(), {6});
    const DeviceMeshPtr a = mesh->submesh({"a"});
    const DeviceMeshPtr b = mesh->submesh({"b"});
    const Tensors plain = tensors();
    const Tensors mixed = {distribute_tensor(plain[0], mesh, {S(0), S(1)}), plain[1],
                           distribute_tensor(plain[2], a, {S(0)}),
                           distribute_tensor(plain[3], b, {S(1)}),
                           distribute_tensor(plain[4], line, {S(0)})};
    const std::vector<comm::Communicator*> groups = {&mesh->communicator(0), &mesh->communicator(1),
                                                     &line->communicator(0)};
    for_all_norms([&](const NormOptions& options) {
      at::Tensor norm;
      EXPECT_EQ(collectives(groups, [&] { norm = get_total_norm(mixed, options); }),
                (Counts{1, 1, 1}));
      const at::Tensor wanted = get_total_norm(plain, options);
      expect_close(norm, wanted);
      if (options.reproducible) {
        EXPECT_EQ(norm.item<double>(), wanted.item<double>());
      }
    });
  });
}

// Two meshes of the same ranks, made apart, have groups of their own, of which one is enough.
TEST(TotalNorm, EqualMeshesShareAnAllReduce) {
  on_mesh({2, 2}, [](const DeviceMeshPtr& mesh) {
    const DeviceMeshPtr twin = DeviceMesh::create(mesh->runtime(), {2, 2}, {"a", "b"});
    const Tensors plain = tensors();
    const Tensors mixed = {distribute_tensor(plain[0], mesh, {S(0), S(1)}),
                           distribute_tensor(plain[2], twin, {S(0), S(1)})};
    const std::vector<comm::Communicator*> groups = {&mesh->communicator(0), &mesh->communicator(1),
                                                     &twin->communicator(0),
                                                     &twin->communicator(1)};
    at::Tensor norm;
    EXPECT_EQ(collectives(groups, [&] { norm = get_total_norm(mixed); }), (Counts{1, 1, 0, 0}));
    expect_close(norm, get_total_norm({plain[0], plain[2]}));
  });
}

// As expert parallelism has it: dense parameters sharded over all ranks, expert weights over the
// dim `b` of a mesh whose dim `a` shards each expert again. Every rank holds other experts.
TEST(TotalNorm, ExpertsCountOverTheExpertParallelRanks) {
  on_mesh({2, 3}, [](const DeviceMeshPtr& experts_mesh) {
    const DeviceMeshPtr line = DeviceMesh::create(experts_mesh->runtime(), {6});
    const at::Tensor dense = normals({13, 4}, 1);
    const at::Tensor experts = normals({6, 5, 4}, 2);
    const Tensors mixed = {distribute_tensor(dense, line, {S(0)}),
                           distribute_tensor(experts, experts_mesh, {S(1), S(0)})};
    for_all_norms([&](const NormOptions& options) {
      expect_close(get_total_norm(mixed, options), get_total_norm({dense, experts}, options));
    });
  });
}

// Ranks whose submeshes differ, in an order of first use that a rank could not tell from the
// others' meshes: a different order of the groups on two ranks would not match, and end the run.
TEST(TotalNorm, EachRankMayHaveASubmeshOfItsOwn) {
  on_mesh({2, 2, 2}, [](const DeviceMeshPtr& mesh) {
    const Tensors plain = tensors();
    const DeviceMeshPtr last = mesh->submesh({"c"});
    const DeviceMeshPtr outer = mesh->submesh({"a", "b"});
    const Tensors mixed = {distribute_tensor(plain[2], last, {S(0)}),
                           distribute_tensor(plain[0], outer, {S(1), S(0)}),
                           distribute_tensor(plain[4], mesh->submesh({"b", "c"}), {S(0), S(0)})};
    for_all_norms([&](const NormOptions& options) {
      at::Tensor norm;
      EXPECT_EQ(collectives(mesh, [&] { norm = get_total_norm(mixed, options); }),
                (Counts{1, 1, 1}));
      expect_close(norm, get_total_norm({plain[2], plain[0], plain[4]}, options));
    });
  });
}

// Stages of pipeline parallelism: each has other tensors, one has none.
TEST(TotalNorm, StagesAddUp) {
  on_mesh({3, 2}, [](const DeviceMeshPtr& mesh) {
    const DeviceMeshPtr shards = mesh->submesh({"b"});
    const Tensors plain = tensors();
    Tensors mine;
    if (mesh->coordinate(0) == 0) mine = {distribute_tensor(plain[0], shards, {S(0)})};
    if (mesh->coordinate(0) == 2) {
      mine = {distribute_tensor(plain[2], shards, {S(0)}),
              distribute_tensor(plain[4], shards, {S(0)})};
    }
    for_all_norms([&](NormOptions options) {
      const at::Tensor wanted = get_total_norm({plain[0], plain[2], plain[4]}, options);
      options.stages = mesh->submesh({"a"});
      at::Tensor norm;
      EXPECT_EQ(collectives(mesh, [&] { norm = get_total_norm(mine, options); })[0], 1u);
      expect_close(norm, wanted);
      if (options.reproducible) {
        EXPECT_EQ(norm.item<double>(), wanted.item<double>());
      }
    });
  });
}

// In bfloat16 the plain norm has three digits, and a float32 beside them none of a small double.
TEST(TotalNorm, AReproducibleNormIsRoundedOnce) {
  const Tensors ones = {at::full({1 << 20}, 3.0), at::full({}, 4.0)};
  const double exact = std::sqrt(9.0 * (1 << 20) + 16);
  EXPECT_EQ(get_total_norm(ones, {.reproducible = true}).item<float>(), static_cast<float>(exact));
  const Tensors halves = {at::full({1 << 20}, 3.0, at::kBFloat16)};
  const at::Tensor norm = get_total_norm(halves, {.norm_type = 1, .reproducible = true});
  EXPECT_EQ(norm.scalar_type(), at::kFloat);  // not bfloat16
  EXPECT_EQ(norm.item<double>(), 3.0 * (1 << 20));
  const Tensors with_double = {halves[0], at::full({}, 0x1p-30, at::kDouble)};
  EXPECT_EQ(get_total_norm(with_double, {.norm_type = 1, .reproducible = true}).item<double>(),
            3.0 * (1 << 20) + 0x1p-30);
}

// A reproducible norm depends on no order of additions; the plain one does, or this says nothing.
TEST(TotalNorm, OnlyTheReproducibleNormIsTheSameOnEveryMesh) {
  Tensors plain;
  for (uint64_t i = 0; i < 8; ++i) plain.push_back(normals({301, 7}, 10 + i));
  for (const double p : {1.0, 2.0, 2.5, 3.0}) {
    std::vector<double> norms[2];
    for (const bool reproducible : {false, true}) {
      const NormOptions options = {.norm_type = p, .reproducible = reproducible};
      norms[reproducible].push_back(get_total_norm(plain, options).item<double>());
      for (const int64_t world : {2, 3, 5, 16}) {
        on_mesh({world}, [&](const DeviceMeshPtr& mesh) {
          Tensors sharded;
          for (const at::Tensor& tensor : plain) {
            sharded.push_back(distribute_tensor(tensor, mesh, {S(0)}));
          }
          norms[reproducible].push_back(get_total_norm(sharded, options).item<double>());
        });
      }
    }
    EXPECT_EQ(norms[1], std::vector<double>(norms[1].size(), norms[1][0])) << p;
    EXPECT_NE(norms[0], std::vector<double>(norms[0].size(), norms[0][0])) << p;
  }
}

thread_local int reads_of_a_value = 0;

/// How many times `fn` makes the host wait for a value on the device.
int host_syncs(const std::function<void()>& fn) {
  reads_of_a_value = 0;
  const auto count = [](const at::RecordFunction& call) -> std::unique_ptr<at::ObserverContext> {
    reads_of_a_value += call.name() == std::string("aten::_local_scalar_dense");
    return nullptr;
  };
  const at::CallbackHandle handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback(count).scopes({at::RecordScope::FUNCTION}));
  fn();
  at::removeCallback(handle);
  return reads_of_a_value;
}

TEST(TotalNorm, OnlyErrorIfNonfiniteWaitsForTheDevice) {
  on_mesh({2}, [](const DeviceMeshPtr& mesh) {
    Tensors sharded;
    for (const int64_t rows : {1, 3, 4}) {
      sharded.push_back(distribute_tensor(normals({rows, 2}, 1), mesh, {S(0)}));
    }
    for (const double p : {2.0, 3.0, kInf, 0.0}) {
      for (const bool foreach : {false, true}) {
        EXPECT_EQ(
            host_syncs([&] { get_total_norm(sharded, {.norm_type = p, .foreach = foreach}); }), 0);
      }
      EXPECT_EQ(host_syncs(
                    [&] { get_total_norm(sharded, {.norm_type = p, .error_if_nonfinite = true}); }),
                1);
    }
  });
}

TEST(TotalNorm, NoTensorsAndBadArguments) {
  EXPECT_EQ(get_total_norm({}).item<double>(), 0);
  EXPECT_EQ(get_total_norm({}, {.norm_type = -1, .reproducible = true}).item<double>(), 0);
  const auto message_of = [](const Tensors& tensors, const NormOptions& options) -> std::string {
    try {
      get_total_norm(tensors, options);
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
    return "";
  };
  EXPECT_THAT(message_of({at::zeros({1}), at::Tensor()}, {}),
              HasSubstr("tensor 1 of 2 is undefined"));
  EXPECT_THAT(message_of({at::zeros({1})}, {.norm_type = std::nan("")}),
              HasSubstr("norm_type is nan"));
  EXPECT_THAT(message_of({at::zeros({1}, at::kMeta)}, {.reproducible = true}),
              HasSubstr("needs tensors on the CPU, got one on meta"));
  EXPECT_THAT(message_of({at::full({1}, kInf)}, {.error_if_nonfinite = true}),
              HasSubstr("the norm of order 2 of the tensors is inf"));
}

}  // namespace
}  // namespace ppfsdp::optim
