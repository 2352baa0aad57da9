// A model, sharded over four ranks, trained, and tested against one device.
#include <ATen/ops/equal.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/silu.h>
#include <gtest/gtest.h>
#include <torch/utils.h>

#include "sim/mesh/world.h"
#include "src/comm/single_runtime.h"
#include "src/dtensor/dtensor.h"
#include "src/fsdp/fully_shard.h"
#include "src/nn/linear.h"
#include "src/optim/adamw.h"

using namespace ppfsdp;

struct NetImpl : nn::Module {
  NetImpl() {
    up = register_module("up", nn::Linear(8, 30));
    down = register_module("down", nn::Linear(30, 1));
  }
  at::Tensor forward(const at::Tensor& x) { return down(at::silu(up(x))); }
  nn::Linear up = nullptr, down = nullptr;
};
PPFSDP_MODULE(Net);

// Ten steps on the rank's devices; every rank sees the same batch. Returns up.weight, whole.
at::Tensor train(comm::Runtime& runtime) {
  torch::manual_seed(0);
  Net net;
  const at::Tensor x = at::randn({16, 8}), y = at::randn({16, 1});
  const auto mesh = mesh::DeviceMesh::create(runtime, {runtime.world_size()}, {"shard"});
  fsdp::fully_shard(*net->up, {.mesh = mesh});
  fsdp::fully_shard(*net, {.mesh = mesh});
  optim::AdamW optimizer(net->parameters());  // the parameters are DTensors now
  for (int step = 0; step < 10; ++step) {
    optimizer.zero_grad();
    at::mse_loss(net(x), y).backward();
    optimizer.step();
  }
  return dtensor::full_tensor(net->named_parameters()["up.weight"]).detach().clone();
}

// Equal batches make the average over four ranks exact, so every bit must agree.
TEST(Example, FourRanksTrainAsOne) {
  const at::Tensor expected = train(*comm::make_single_runtime());
  sim::run_world(4, {.seed = 1, .schedule = sim::Schedule::kRandom}, [&](comm::Runtime& runtime) {
    EXPECT_TRUE(at::equal(train(runtime), expected)) << "rank " << runtime.rank();
  });
}
