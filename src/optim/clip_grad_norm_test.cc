#include "src/optim/clip_grad_norm.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>

#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>

#include "sim/mesh/world.h"
#include "src/dtensor/dtensor.h"
#include "src/mesh/device_mesh.h"

namespace ppfsdp::optim {
namespace {

using ::testing::HasSubstr;

constexpr double kInf = std::numeric_limits<double>::infinity();

/// Leaves with gradients, of sizes that leave short and empty shards on four ranks; one without.
std::vector<at::Tensor> make_parameters() {
  at::manual_seed(2);
  std::vector<at::Tensor> result;
  for (const std::vector<int64_t>& sizes :
       std::vector<std::vector<int64_t>>{{5, 7}, {9}, {1, 3}, {2}}) {
    result.push_back(at::zeros(sizes).requires_grad_());
    if (sizes[0] != 2) result.back().mutable_grad() = at::randn(sizes);
  }
  return result;
}

at::Tensor all_grads(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> flat;
  for (const at::Tensor& parameter : parameters) {
    if (parameter.grad().defined()) flat.push_back(parameter.grad().flatten());
  }
  return at::cat(flat);
}

TEST(ClipGradNorm, ScalesToTheNormAskedForAndReturnsTheOneBefore) {
  for (const double p : {1.0, 2.0, 3.0, kInf}) {
    for (const bool foreach : {false, true}) {
      std::vector<at::Tensor> parameters = make_parameters();
      const auto before = at::linalg_vector_norm(all_grads(parameters), p).item<double>();
      const auto norm = clip_grad_norm_(parameters, 0.5, p, false, foreach).item<double>();
      // 47 values: a norm of norms adds them in another order, which costs some ulps of 6e-8.
      EXPECT_NEAR(norm / before, 1, 1e-6);
      EXPECT_NEAR(at::linalg_vector_norm(all_grads(parameters), p).item<double>(), 0.5, 1e-5);
    }
  }
}

TEST(ClipGradNorm, LeavesSmallGradientsAlone) {
  std::vector<at::Tensor> parameters = make_parameters();
  const at::Tensor before = all_grads(parameters);
  clip_grad_norm_(parameters, 1000);
  EXPECT_TRUE(at::equal(all_grads(parameters), before));
}

// Infinity times the reciprocal of infinity would make every gradient NaN.
TEST(ClipGradNorm, WithoutALimitGradientsStayThoughTheNormIsInfinite) {
  for (const bool foreach : {false, true}) {
    const std::vector<at::Tensor> parameters = make_parameters();
    parameters[0].mutable_grad() = at::full({5, 7}, 1e30f);
    const at::Tensor before = all_grads(parameters).clone();
    EXPECT_EQ(clip_grad_norm_(parameters, kInf, 2.0, false, foreach).item<double>(), kInf);
    EXPECT_TRUE(at::equal(all_grads(parameters), before));
  }
}

TEST(ClipGradNorm, IsLibTorchsToTheBitWherePowersOfTwoHideItsRounding) {
  for (const double p : {1.0, 2.0, 3.0, kInf}) {
    std::vector<at::Tensor> ours = make_parameters(), theirs = make_parameters();
    const auto norm = clip_grad_norm_(ours, 0.5, p).item<double>();
    EXPECT_EQ(norm, torch::nn::utils::clip_grad_norm_(theirs, 0.5, p));
    EXPECT_TRUE(at::equal(all_grads(ours), all_grads(theirs)));
  }
}

TEST(ClipGradNorm, ShardedGradientsGiveTheNormOfTheWholeOnEveryRank) {
  for (const double p : {1.0, 2.0, 3.0, kInf}) {
    for (const bool foreach : {false, true}) {
      std::vector<at::Tensor> whole = make_parameters();
      const auto expected = clip_grad_norm_(whole, 0.5, p).item<double>();
      std::vector<double> norms(4);
      sim::run_world(4, {}, [&](comm::Runtime& runtime) {
        const auto mesh = mesh::DeviceMesh::create(runtime, {4});
        const dtensor::Placements shard = {dtensor::Placement::shard(0)};
        std::vector<at::Tensor> sharded;
        for (const at::Tensor& parameter : make_parameters()) {
          sharded.push_back(
              dtensor::distribute_tensor(parameter.detach(), mesh, shard).requires_grad_());
          if (!parameter.grad().defined()) continue;
          sharded.back().mutable_grad() = dtensor::distribute_tensor(parameter.grad(), mesh, shard);
        }
        const uint64_t issued = mesh->communicator(0).sequence();
        const at::Tensor norm = clip_grad_norm_(sharded, 0.5, p, false, foreach);
        // The norms of all gradients travel together.
        EXPECT_EQ(mesh->communicator(0).sequence() - issued, 1u);
        EXPECT_FALSE(dtensor::is_dtensor(norm));
        norms[runtime.rank()] = norm.item<double>();
        EXPECT_NEAR(norms[runtime.rank()] / expected, 1, 1e-6);
        for (size_t i = 0; i < 3; ++i) {
          const at::Tensor difference = dtensor::full_tensor(sharded[i].grad()) - whole[i].grad();
          EXPECT_LT(difference.abs().max().item<double>(), 1e-6);
        }
      });
      EXPECT_EQ(norms, std::vector<double>(4, norms[0]));
    }
  }
}

/// Multiples of 1/256 of either sign, one of them 0.
at::Tensor simple_values(const std::vector<int64_t>& sizes, int64_t k, at::ScalarType dtype) {
  const at::Tensor i = at::arange(c10::multiply_integers(sizes), at::kLong);
  return (((i * 7919 + k * 104729) % 2003 - 1001).to(at::kFloat) / 256).to(dtype).reshape(sizes);
}

struct PythonsClip {
  double p;
  double norm;     ///< of the list below
  double element;  ///< [17] of its fourth tensor, clipped to 3.3
};

/// From torch.nn.utils.clip_grad_norm_ of PyTorch 2.11, which gave the same with and without
/// foreach, on one thread: by dtypes of the five gradients (float32, bfloat16, half, double).
const std::vector<std::pair<std::string, std::vector<PythonsClip>>> kPythonsClips = {
    {"fffff",
     {
         {2.0, 0x1.3e1702p6, -0x1.1e800ap-3},
         {1.0, 0x1.2e9a8p11, -0x1.2d2992p-8},
         {3.0, 0x1.a7bc58p4, -0x1.ae23c8p-2},
         {2.5, 0x1.478f46p5, -0x1.1637a6p-2},
         {kInf, 0x1.f48p1, -0x1.6c2abcp1},
         {-kInf, 0, -0x1.af8p1},
         {0.0, 0x1.4p2, -0x1.1cca3ap1},
         {-1.0, 0, -0x1.af8p1},
     }},
    {"bbbbb",
     {
         {2.0, 0x1.3ep6, -0x1.1ep-3},
         {1.0, 0x1.2ep11, -0x1.2ep-8},
         {3.0, 0x1.a8p4, -0x1.bp-2},
         {2.5, 0x1.48p5, -0x1.16p-2},
         {kInf, 0x1.f4p1, -0x1.6cp1},
         {-kInf, 0, -0x1.bp1},
         {0.0, 0x1.4p2, -0x1.1ep1},
         {-1.0, 0, -0x1.bp1},
     }},
    {"fbfbb",
     {
         {2.0, 0x1.3eebd6p6, -0x1.1ep-3},
         {1.0, 0x1.2ecep11, -0x1.2ep-8},
         {3.0, 0x1.a816bp4, -0x1.aep-2},
         {2.5, 0x1.47a2c4p5, -0x1.16p-2},
         {kInf, 0x1.f48p1, -0x1.6cp1},
         {-kInf, 0, -0x1.bp1},
         {0.0, 0x1.4p2, -0x1.1ep1},
         {-1.0, 0, -0x1.bp1},
     }},
    {"bfhfb",
     {
         {2.0, 0x1.3e0c5p6, -0x1.1e89aep-3},
         {1.0, 0x1.2e9a8p11, -0x1.2d2992p-8},
         {3.0, 0x1.a7b232p4, -0x1.ae2e14p-2},
         {2.5, 0x1.479784p5, -0x1.1630a8p-2},
         {kInf, 0x1.f48p1, -0x1.6c2abcp1},
         {-kInf, 0, -0x1.af8p1},
         {0.0, 0x1.4p2, -0x1.1cca3ap1},
         {-1.0, 0, -0x1.af8p1},
     }},
    {"dfbbd",
     {
         {2.0, 0x1.3edfe37985b2ep6, -0x1.1ep-3},
         {1.0, 0x1.2ee66p11, -0x1.2ep-8},
         {3.0, 0x1.a80f18e868f34p4, -0x1.aep-2},
         {2.5, 0x1.47b33e95d149ep5, -0x1.16p-2},
         {kInf, 0x1.f48p1, -0x1.6cp1},
         {-kInf, 0, -0x1.bp1},
         {0.0, 0x1.4p2, -0x1.1ep1},
         {-1.0, 0, -0x1.bp1},
     }},
};

// Two roundings of the factor, the dtypes of norms of mixed lists and their order: all as Python's.
TEST(ClipGradNorm, GivesTheBitsOfPythons) {
  const std::vector<std::vector<int64_t>> sizes = {{5, 7}, {}, {64, 3}, {1000}, {2, 2, 2}};
  const std::map<char, at::ScalarType> dtypes = {
      {'f', at::kFloat}, {'b', at::kBFloat16}, {'h', at::kHalf}, {'d', at::kDouble}};
  at::set_num_threads(1);
  for (const auto& [letters, clips] : kPythonsClips) {
    for (const PythonsClip& clip : clips) {
      for (const bool foreach : {false, true}) {
        std::vector<at::Tensor> parameters;
        for (size_t k = 0; k < sizes.size(); ++k) {
          const at::Tensor gradient =
              simple_values(sizes[k], static_cast<int64_t>(k), dtypes.at(letters[k]));
          parameters.push_back(at::zeros_like(gradient).requires_grad_());
          parameters.back().mutable_grad() = gradient;
        }
        const at::Tensor norm = clip_grad_norm_(parameters, 3.3, clip.p, false, foreach);
        EXPECT_EQ(norm.item<double>(), clip.norm) << letters << ", p " << clip.p;
        EXPECT_EQ(parameters[3].grad()[17].item<double>(), clip.element)
            << letters << ", p " << clip.p;
      }
    }
  }
}

// The unmodified torch::nn::utils::clip_grad_norm_, also on one gradient, with one all-reduce.
TEST(ClipGradNorm, LibTorchsOwnClipsShardedGradientsToo) {
  for (const double p : {1.0, 2.0, 3.0, 2.5, -1.0, kInf, -kInf}) {
    for (const size_t count : {1, 2}) {
      sim::run_world(2, {}, [&](comm::Runtime& runtime) {
        const auto mesh = mesh::DeviceMesh::create(runtime, {2});
        const dtensor::Placements shard = {dtensor::Placement::shard(0)};
        std::vector<at::Tensor> ours, theirs;
        for (std::vector<at::Tensor>* list : {&ours, &theirs}) {
          at::manual_seed(2);
          for (const int64_t rows : {5, 1}) {
            if (list->size() == count) break;
            const at::Tensor grad = at::randn({rows, 3});
            list->push_back(
                dtensor::distribute_tensor(at::zeros({rows, 3}), mesh, shard).requires_grad_());
            list->back().mutable_grad() = dtensor::distribute_tensor(grad, mesh, shard);
          }
        }
        const auto norm = clip_grad_norm_(ours, 0.5, p).item<double>();
        const uint64_t issued = mesh->communicator(0).sequence();
        EXPECT_EQ(norm, torch::nn::utils::clip_grad_norm_(theirs, 0.5, p)) << p;
        EXPECT_EQ(mesh->communicator(0).sequence() - issued, 1u);
        for (size_t i = 0; i < ours.size(); ++i) {
          EXPECT_TRUE(
              at::equal(dtensor::local_of(ours[i].grad()), dtensor::local_of(theirs[i].grad())));
        }
      });
    }
  }
}

TEST(ClipGradNorm, NonFiniteNormsAreAnErrorOnlyOnRequest) {
  std::vector<at::Tensor> parameters = make_parameters();
  parameters[0].mutable_grad().fill_(kInf);
  const at::Tensor before = all_grads(parameters);
  try {
    clip_grad_norm_(parameters, 1, 2, /*error_if_nonfinite=*/true);
    FAIL();
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what_without_backtrace(),
                HasSubstr("is inf; gradients can't be clipped by it"));
  }
  EXPECT_TRUE(at::equal(all_grads(parameters), before));
  EXPECT_EQ(clip_grad_norm_(parameters, 1).item<double>(), kInf);
}

TEST(ClipGradNorm, NoGradientsAndBadArguments) {
  const std::vector<at::Tensor> none = {at::zeros({1}).requires_grad_()};
  EXPECT_EQ(clip_grad_norm_(none, 1).item<double>(), 0);
  const auto message_of = [](const std::function<void()>& fn) -> std::string {
    try {
      fn();
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
    return "";
  };
  const std::vector<at::Tensor> parameters = make_parameters();
  EXPECT_THAT(message_of([&] { clip_grad_norm_(parameters, -1); }),
              HasSubstr("clip_grad_norm_: max_norm is -1, must not be negative"));
  EXPECT_THAT(message_of([&] { clip_grad_norm_(parameters, std::nan("")); }),
              HasSubstr("max_norm is nan"));
  EXPECT_THAT(message_of([&] {
                clip_grad_norm_({parameters[0], at::Tensor()}, 1);
              }),
              HasSubstr("parameter 1 of 2 is undefined"));
  EXPECT_THAT(message_of([&] { clip_grads_with_norm_(parameters, 1, at::zeros({2})); }),
              HasSubstr("total_norm must be a tensor without dims, got one of sizes [2]"));
  EXPECT_THAT(message_of([&] { clip_grads_with_norm_(parameters, 1, at::Tensor()); }),
              HasSubstr("got an undefined one"));
}

// The two halves of clip_grad_norm_, for lists that are clipped by the norm of both: what users of
// expert parallelism do.
TEST(ClipGradNorm, ListsCanBeClippedByOneNorm) {
  for (const bool foreach : {false, true}) {
    const std::vector<at::Tensor> together = make_parameters(), apart = make_parameters();
    const at::Tensor norm = clip_grad_norm_(together, 0.7);
    std::vector<at::Tensor> grads;
    for (const at::Tensor& parameter : apart) {
      if (parameter.grad().defined()) grads.push_back(parameter.grad());
    }
    EXPECT_TRUE(at::equal(get_total_norm(grads), norm));
    clip_grads_with_norm_({apart[0]}, 0.7, norm, foreach);
    clip_grads_with_norm_({apart[1], apart[2], apart[3]}, 0.7, norm, foreach);
    EXPECT_TRUE(at::equal(all_grads(apart), all_grads(together)));
  }
}

// As a DTensor the norm is partial: each rank's part of it would clip by too little.
TEST(ClipGradNorm, ANormThatIsPartialIsMadeWhole) {
  sim::run_world(2, {}, [&](comm::Runtime& runtime) {
    const auto mesh = mesh::DeviceMesh::create(runtime, {2});
    const at::Tensor grad =
        dtensor::distribute_tensor(at::full({4}, 2.0), mesh, {dtensor::Placement::shard(0)});
    const at::Tensor parameter = at::zeros_like(grad).requires_grad_();
    parameter.mutable_grad() = grad;
    const at::Tensor partial = at::linalg_vector_norm(grad, 2);
    ASSERT_TRUE(dtensor::spec_of(partial)->placements[0].is_partial());
    clip_grads_with_norm_({parameter}, 1, partial);
    // 2 / (4 + 1e-6): the norm of the shard alone is sqrt(8).
    EXPECT_FLOAT_EQ(dtensor::full_tensor(grad)[0].item<float>(), 0.5F);
    // A rank that has nothing to clip takes part in the reduction all the same.
    clip_grads_with_norm_(
        runtime.rank() == 0 ? std::vector<at::Tensor>{parameter} : std::vector<at::Tensor>{}, 1,
        at::linalg_vector_norm(grad, 2));
  });
}

// Scaling by a factor that is at least 0 commutes with what makes a partial value whole.
TEST(ClipGradNorm, ClipsPartialAndUnevenAndReplicatedGradients) {
  using dtensor::Placement;
  using Op = Placement::PartialOp;
  sim::run_world(3, {}, [&](comm::Runtime& runtime) {
    const auto mesh = mesh::DeviceMesh::create(runtime, {3});
    const double mine = static_cast<double>(runtime.rank()) + 1;
    std::vector<at::Tensor> parameters, whole;
    for (const Placement& placement :
         {Placement::partial(), Placement::partial(Op::kAvg), Placement::partial(Op::kMax),
          Placement::replicate(), Placement::shard(0)}) {
      const at::Tensor values = at::full({4}, placement.is_partial() ? mine : 3.0);
      // Of four rows over three ranks the last has none.
      const at::Tensor grad = placement.is_shard()
                                  ? dtensor::distribute_tensor(values, mesh, {placement})
                                  : dtensor::from_local(values, mesh, {placement});
      parameters.push_back(at::zeros_like(grad).requires_grad_());
      parameters.back().mutable_grad() = grad;
      whole.push_back(dtensor::full_tensor(grad).clone());
    }
    const at::Tensor norm = clip_grad_norm_(parameters, 1.0);
    EXPECT_FLOAT_EQ(norm.item<float>(), get_total_norm(whole).item<float>());
    for (size_t i = 0; i < whole.size(); ++i) {
      const at::Tensor clipped = dtensor::full_tensor(parameters[i].grad());
      const auto error = (clipped * norm - whole[i]).abs().max().item<double>();
      EXPECT_LT(error, 1e-5) << i;
    }
  });
}

thread_local int values_read = 0;

// A value that the host reads stops it until the device has come so far, in every step.
TEST(ClipGradNorm, OnlyErrorIfNonfiniteWaitsForTheDevice) {
  const at::CallbackHandle handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback([](const at::RecordFunction& call)
                                     -> std::unique_ptr<at::ObserverContext> {
        values_read += call.name() == std::string("aten::_local_scalar_dense");
        return nullptr;
      }).scopes({at::RecordScope::FUNCTION}));
  for (const double p : {2.0, 3.0, kInf, 0.0}) {
    for (const bool foreach : {false, true}) {
      values_read = 0;
      clip_grad_norm_(make_parameters(), 1, p, false, foreach);
      EXPECT_EQ(values_read, 0) << p;
      clip_grad_norm_(make_parameters(), 1, p, true, foreach);
      EXPECT_EQ(values_read, 1) << p;
    }
  }
  at::removeCallback(handle);
}

// Saved for backward, then scaled: LibTorch must notice.
TEST(ClipGradNorm, CountsAsAWrite) {
  for (const bool foreach : {false, true}) {
    const std::vector<at::Tensor> parameters = make_parameters();
    const auto before = parameters[0].grad()._version();
    clip_grad_norm_(parameters, 1, 2, false, foreach);
    EXPECT_GT(parameters[0].grad()._version(), before);
  }
}

}  // namespace
}  // namespace ppfsdp::optim
