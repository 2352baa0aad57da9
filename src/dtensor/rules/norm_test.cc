// Norms of DTensors, by every op that takes them, against those of the gathered tensors.
#include <ATen/TensorOperators.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <vector>

#include "src/comm/communicator.h"
#include "src/dtensor/dtensor.h"
#include "src/dtensor/testing.h"

namespace ppfsdp::dtensor {
namespace {

using testing::kP;
using testing::kR;
using testing::normals;
using testing::on_mesh;
using testing::S;

using Tensors = std::vector<at::Tensor>;

constexpr double kInf = std::numeric_limits<double>::infinity();
const std::vector<double> kOrders = {2, 1, 3, 2.5, 0.5, kInf, -kInf, 0, -1, -2};

struct Op {
  const char* name;
  std::function<Tensors(const Tensors& x, double p)> run;
};

const std::vector<Op> kOps = {
    {"norm", [](const Tensors& x, double p) -> Tensors { return {x[0].norm(p)}; }},
    {"norm, dtype",
     [](const Tensors& x, double p) -> Tensors { return {x[0].norm(p, at::kDouble)}; }},
    {"norm, dim", [](const Tensors& x, double p) -> Tensors { return {x[0].norm(p, {0}, true)}; }},
    {"norm, dim, dtype",
     [](const Tensors& x, double p) -> Tensors {
       return {x[0].norm(p, {-1}, false, at::kDouble)};
     }},
    {"vector_norm",
     [](const Tensors& x, double p) -> Tensors { return {at::linalg_vector_norm(x[0], p)}; }},
    {"vector_norm, dims, keepdim",
     [](const Tensors& x, double p) -> Tensors {
       return {at::linalg_vector_norm(x[0], p, at::IntArrayRef({0, -1}), true)};
     }},
    {"vector_norm, dim",
     [](const Tensors& x, double p) -> Tensors {
       return {at::linalg_vector_norm(x[0], p, at::IntArrayRef({1}))};
     }},
    {"vector_norm, dtype",
     [](const Tensors& x, double p) -> Tensors {
       return {at::linalg_vector_norm(x[0], p, std::nullopt, false, at::kDouble)};
     }},
    {"foreach", [](const Tensors& x, double p) -> Tensors { return at::_foreach_norm(x, p); }},
    {"foreach, dtype",
     [](const Tensors& x, double p) -> Tensors { return at::_foreach_norm(x, p, at::kDouble); }},
    {"norm of stacked norms",
     [](const Tensors& x, double p) -> Tensors {
       Tensors norms;
       for (const at::Tensor& tensor : x) norms.push_back(tensor.norm(p));
       return {at::linalg_vector_norm(at::stack(norms), p), at::stack(norms).norm(p)};
     }},
    {"norm of stacked foreach norms",
     [](const Tensors& x, double p) -> Tensors {
       return {at::linalg_vector_norm(at::stack(at::_foreach_norm(x, p)), p)};
     }},
};

/// Nothing where the op throws.
std::optional<Tensors> result_of(const Op& op, const Tensors& x, double p) {
  try {
    return op.run(x, p);
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

/// Some tens of roundings of values that are below 2^24 of them apart in float32; of bfloat16,
/// whose norms are bfloat16s too, sixteen of 2^-9.
double tolerance(at::ScalarType dtype) { return dtype == at::kBFloat16 ? 0x1p-5 : 1e-5; }

void expect_alike(const Tensors& got, const Tensors& wanted, at::ScalarType dtype,
                  const std::string& what) {
  ASSERT_EQ(got.size(), wanted.size()) << what;
  for (size_t k = 0; k < got.size(); ++k) {
    const at::Tensor whole = is_dtensor(got[k]) ? full_tensor(got[k]) : got[k];
    ASSERT_EQ(whole.sizes(), wanted[k].sizes()) << what;
    ASSERT_EQ(whole.scalar_type(), wanted[k].scalar_type()) << what;
    const at::Tensor a = whole.to(at::kDouble).flatten().contiguous();
    const at::Tensor b = wanted[k].to(at::kDouble).flatten().contiguous();
    for (int64_t i = 0; i < a.numel(); ++i) {
      const double x = a.const_data_ptr<double>()[i];
      const double y = b.const_data_ptr<double>()[i];
      const bool same = x == y || (std::isnan(x) && std::isnan(y)) ||
                        std::abs(x - y) <= tolerance(dtype) * std::abs(y);
      EXPECT_TRUE(same) << what << ": " << x << " is not " << y;
    }
  }
}

void compare_all(const mesh::DeviceMeshPtr& mesh, const Tensors& plain,
                 const std::vector<Placements>& all, const std::vector<double>& orders) {
  for (const Placements& placements : all) {
    Tensors sharded;
    for (const at::Tensor& tensor : plain) {
      sharded.push_back(distribute_tensor(tensor, mesh, placements));
    }
    for (const double p : orders) {
      for (const Op& op : kOps) {
        const std::string what = std::string(op.name) + ", p " + std::to_string(p) + ", " +
                                 to_string(placements) + ", " +
                                 c10::toString(plain[0].scalar_type());
        const std::optional<Tensors> wanted = result_of(op, plain, p);
        const std::optional<Tensors> got = result_of(op, sharded, p);
        // What LibTorch refuses, no rank accepts, or the others wait for it for ever.
        ASSERT_EQ(got.has_value(), wanted.has_value()) << what;
        if (wanted) expect_alike(*got, *wanted, plain[0].scalar_type(), what);
      }
    }
  }
}

// Uneven and empty shards, every placement.
TEST(NormRule, EveryOrderOpAndPlacement) {
  on_mesh({3}, [](const mesh::DeviceMeshPtr& mesh) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      compare_all(mesh, {normals({4, 5}, 1).to(dtype), normals({2, 3}, 2).to(dtype)},
                  {{S(0)}, {S(1)}, {kR}, {kP}}, kOrders);
    }
  });
  on_mesh({2, 3}, [](const mesh::DeviceMeshPtr& mesh) {
    compare_all(mesh, {normals({7, 5}, 1), normals({2, 2}, 2)},
                {{S(0), S(1)},
                 {S(0), S(0)},
                 {Placement::strided_shard(0, 3), S(0)},
                 {kR, S(1)},
                 {S(1), kP}},
                {2, 3, kInf, -kInf, 0, -1});
  });
}

// A half holds the norms, but not the squares that the ranks add up.
TEST(NormRule, HalfNormsDoNotOverflowOrVanish) {
  on_mesh({3}, [](const mesh::DeviceMeshPtr& mesh) {
    for (const double scale : {300.0, 1e-4}) {
      for (const double p : {2.0, 3.0, -2.0}) {
        const Tensors plain = {at::full({6, 2}, scale, at::kHalf), at::full({4}, scale, at::kHalf)};
        Tensors sharded;
        for (const at::Tensor& tensor : plain) {
          sharded.push_back(distribute_tensor(tensor, mesh, {S(0)}));
        }
        for (const size_t k : {size_t{4}, size_t{8}, size_t{11}}) {
          const at::Tensor got = full_tensor(kOps[k].run(sharded, p)[0]);
          const auto wanted = kOps[k].run(plain, p)[0].item<double>();
          EXPECT_EQ(got.scalar_type(), at::kHalf);
          // Three roundings to 11 bits, and at 1e-4 to the 7 or so that subnormals have there.
          EXPECT_NEAR(got.item<double>() / wanted, 1, 0x1p-6) << kOps[k].name << ", p " << p;
        }
      }
    }
  });
}

// Of no elements at all LibTorch refuses some norms: on every rank, whatever its other shards are.
TEST(NormRule, EmptyTensors) {
  on_mesh({3}, [](const mesh::DeviceMeshPtr& mesh) {
    compare_all(mesh, {at::zeros({0, 5}), normals({2, 3}, 2)}, {{S(0)}, {S(1)}, {kR}}, kOrders);
    compare_all(mesh, {normals({2, 3}, 2), at::zeros({4, 0})}, {{S(0)}, {S(1)}, {kR}}, kOrders);
  });
}

TEST(NormRule, NonFiniteValuesOfOneShardReachTheWhole) {
  on_mesh({3}, [](const mesh::DeviceMeshPtr& mesh) {
    for (const double bad : {kInf, -kInf, std::numeric_limits<double>::quiet_NaN()}) {
      for (const int64_t row : {0, 2, 3}) {
        at::Tensor plain = normals({4, 5}, 1);
        plain[row][1] = bad;
        compare_all(mesh, {plain, normals({2, 3}, 2)}, {{S(0)}, {S(1)}},
                    {2, 3, 0.5, kInf, -kInf, 0, -1});
      }
    }
  });
}

TEST(NormRule, TensorsWithoutDims) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    for (const double p : kOrders) {
      const Tensors plain = {at::full({}, -3.0), at::full({}, 4.0)};
      const Tensors whole = {distribute_tensor(plain[0], mesh, {kR}),
                             distribute_tensor(plain[1], mesh, {kP})};
      for (const size_t k : {size_t{0}, size_t{4}, size_t{8}, size_t{11}}) {
        expect_alike(kOps[k].run(whole, p), kOps[k].run(plain, p), at::kFloat, kOps[k].name);
      }
    }
  });
}

// A norm that is whole, put beside partial ones, has a share once, and one of a power below 0 is
// infinite where it has none.
TEST(NormRule, WholeNormsStackedWithPartialOnes) {
  on_mesh({3}, [](const mesh::DeviceMeshPtr& mesh) {
    for (const double p : kOrders) {
      const Tensors plain = {normals({4, 5}, 1), normals({2, 3}, 2)};
      const Tensors mixed = {distribute_tensor(plain[0], mesh, {S(0)}),
                             distribute_tensor(plain[1], mesh, {kR})};
      expect_alike(kOps[10].run(mixed, p), kOps[10].run(plain, p), at::kFloat, std::to_string(p));
      expect_alike({at::stack({mixed[0].norm(p), plain[1].norm(p)}).norm(p)},
                   {at::stack({plain[0].norm(p), plain[1].norm(p)}).norm(p)}, at::kFloat,
                   std::to_string(p));
    }
  });
}

// A norm is asked for as a whole several times over (for the factor, to log it): one reduction. But
// a write to it must be seen.
TEST(NormRule, APartialNumberIsReducedOnceUntilItIsWrittenTo) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor norm = distribute_tensor(at::full({4}, 2.0), mesh, {S(0)}).norm(2);
    const auto issued = [&, before = mesh->communicator(0).sequence()] {
      return mesh->communicator(0).sequence() - before;
    };
    EXPECT_EQ((norm + 1).item<double>(), 5);
    EXPECT_EQ(norm.item<double>(), 4);
    EXPECT_EQ((norm * norm).item<double>(), 16);
    EXPECT_EQ(issued(), 1u);
    local_of(norm).mul_(3);                   // each rank's share
    EXPECT_FLOAT_EQ(norm.item<float>(), 12);  // a square and a root
    EXPECT_EQ(issued(), 2u);
    norm.mul_(2);
    EXPECT_FLOAT_EQ(norm.item<float>(), 24);
    // The sum's whole value is handed on as it is; a write to that is none to the sum.
    const at::Tensor sum = distribute_tensor(at::full({4}, 2.0), mesh, {S(0)}).sum();
    EXPECT_EQ(sum.item<double>(), 8);
    full_tensor(sum).mul_(5);
    (sum + 0).add_(1);
    EXPECT_EQ(sum.item<double>(), 8);
  });
}

}  // namespace
}  // namespace ppfsdp::dtensor
