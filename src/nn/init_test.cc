// The initializers are torch::nn::init's, bit for bit, and of a sharded weight of any number of
// dims use the global fans: a bound from a shard's would differ.
#include "src/nn/init.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <gtest/gtest.h>
#include <torch/nn/init.h>

#include <cmath>
#include <functional>
#include <vector>

#include "src/dtensor/dtensor.h"
#include "src/dtensor/testing.h"

namespace ppfsdp::nn {
namespace {

namespace init = torch::nn::init;
using dtensor::Placements;
using dtensor::testing::difference;
using dtensor::testing::kR;
using dtensor::testing::S;

struct Pair {
  Initializer own;
  std::function<at::Tensor(at::Tensor tensor)> libtorch;
};

const std::vector<Pair>& pairs() {
  static const auto* all = new std::vector<Pair>{
      {kaiming_uniform(), [](at::Tensor t) { return init::kaiming_uniform_(t, std::sqrt(5.0)); }},
      {kaiming_uniform(0.3), [](at::Tensor t) { return init::kaiming_uniform_(t, 0.3); }},
      {kaiming_normal(), [](at::Tensor t) { return init::kaiming_normal_(t); }},
      {xavier_uniform(), [](at::Tensor t) { return init::xavier_uniform_(t); }},
      {xavier_normal(1.5), [](at::Tensor t) { return init::xavier_normal_(t, 1.5); }},
      {normal(1, 2), [](at::Tensor t) { return init::normal_(t, 1, 2); }},
  };
  return *all;
}

TEST(Init, equals_libtorchs_on_one_device_and_sharded) {
  for (const std::vector<int64_t>& sizes :
       {std::vector<int64_t>{7, 5}, {6, 4, 3}, {5, 3, 3, 2}, {4, 6, 1, 2, 3}}) {
    for (const Pair& pair : pairs()) {
      at::manual_seed(3);
      const at::Tensor wanted = pair.libtorch(at::empty(sizes));
      at::manual_seed(3);
      at::Tensor plain = at::empty(sizes).requires_grad_();
      pair.own(plain);
      EXPECT_EQ(difference(plain.detach(), wanted), "");

      for (const Placements& placements : {Placements{S(0), S(1)}, {S(1), S(0)}, {kR, S(0)}}) {
        at::manual_seed(3);
        dtensor::testing::on_mesh({2, 2}, [&](const mesh::DeviceMeshPtr& mesh) {
          at::Tensor sharded =
              dtensor::distribute_tensor(at::empty(sizes).requires_grad_(), mesh, placements);
          pair.own(sharded);
          const at::NoGradGuard no_grad;
          EXPECT_EQ(difference(dtensor::full_tensor(sharded), wanted), "");
        });
      }
    }
  }
}

TEST(Init, weights_without_fans_are_errors) {
  at::Tensor vector = at::empty({4});
  EXPECT_ANY_THROW(kaiming_uniform()(vector));
  EXPECT_ANY_THROW(xavier_normal()(vector));
}

}  // namespace
}  // namespace ppfsdp::nn
