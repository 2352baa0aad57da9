// src/optim against golden/optimizer.safetensors, which Python wrote
// (python/make_optimizer_golden.py): every bit must be equal.
#include <ATen/Version.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "src/checkpoint/safetensors.h"
#include "src/optim/adamw.h"
#include "src/optim/clip_grad_norm.h"
#include "src/optim/sgd.h"

namespace ppfsdp::golden {
namespace {

using optim::Implementation;

constexpr int kSteps = 5, kParameters = 4;
const std::pair<std::string, Implementation> kImplementations[] = {
    {"single", Implementation::kSingleTensor},
    {"foreach", Implementation::kForeach},
    {"fused", Implementation::kFused}};

const checkpoint::SafetensorsFile& file() {
  static const checkpoint::SafetensorsFile opened("golden/optimizer.safetensors");
  return opened;
}

class PythonsBits : public ::testing::Test {
 protected:
  void SetUp() override {
    // Without AVX2 LibTorch's kernels have no fused multiply-add, which lerp's bits show.
    if (at::get_cpu_capability() == "DEFAULT") GTEST_SKIP() << "recorded with AVX2 kernels";
  }

  static void expect_equal(
      const std::string& name,
      const std::function<std::unique_ptr<optim::Optimizer>(std::vector<at::Tensor>)>& make) {
    std::vector<at::Tensor> parameters;
    for (int i = 0; i < kParameters; ++i) {
      parameters.push_back(file().tensor(fmt::format("start/{}", i)).clone().requires_grad_());
    }
    const auto optimizer = make(parameters);
    for (int step = 0; step < kSteps; ++step) {
      optimizer->set_lr(0.01 / (1 + step));
      for (int i = 0; i < kParameters; ++i) {
        parameters[i].mutable_grad() = file().tensor(fmt::format("grad/{}/{}", step, i)).clone();
      }
      optimizer->step();
    }
    for (int i = 0; i < kParameters; ++i) {
      EXPECT_TRUE(at::equal(parameters[i], file().tensor(fmt::format("{}/{}", name, i))))
          << name << " " << i;
    }
  }
};

TEST_F(PythonsBits, AdamW) {
  for (const auto& [name, implementation] : kImplementations) {
    expect_equal("adamw_" + name, [&](std::vector<at::Tensor> parameters) {
      return std::make_unique<optim::AdamW>(
          std::move(parameters),
          optim::AdamWOptions{.weight_decay = 0.1, .implementation = implementation});
    });
  }
}

TEST_F(PythonsBits, Sgd) {
  const std::pair<std::string, optim::SGDOptions> variants[] = {
      {"sgd", {}},
      {"sgd_wd", {.weight_decay = 0.1}},
      {"sgd_momentum", {.momentum = 0.9}},
      {"sgd_dampening", {.momentum = 0.9, .dampening = 0.3, .weight_decay = 0.1}},
      {"sgd_nesterov", {.momentum = 0.9, .weight_decay = 0.1, .nesterov = true}}};
  for (const auto& [variant, options] : variants) {
    for (const auto& [name, implementation] : kImplementations) {
      optim::SGDOptions chosen = options;
      chosen.implementation = implementation;
      expect_equal(variant + "_" + name, [&](std::vector<at::Tensor> parameters) {
        return std::make_unique<optim::SGD>(std::move(parameters), chosen);
      });
    }
  }
}

TEST_F(PythonsBits, ClipGradNorm) {
  for (const std::string order : {"1", "2", "inf"}) {
    for (const std::string limit : {"1", "0.3", "5"}) {
      for (const std::string implementation : {"single", "foreach"}) {
        const std::string name = fmt::format("clip/{}/{}/{}", order, limit, implementation);
        std::vector<at::Tensor> parameters;
        for (int i = 0; i < kParameters; ++i) {
          const at::Tensor grad = file().tensor(fmt::format("clip_grad/{}", i)).clone();
          parameters.push_back(at::zeros_like(grad).requires_grad_());
          parameters.back().mutable_grad() = grad;
        }
        const at::Tensor norm = optim::clip_grad_norm_(
            parameters, std::stod(limit),
            order == "inf" ? std::numeric_limits<double>::infinity() : std::stod(order),
            /*error_if_nonfinite=*/false, implementation == "foreach");
        EXPECT_TRUE(at::equal(norm, file().tensor(name + "/norm"))) << name;
        for (int i = 0; i < kParameters; ++i) {
          EXPECT_TRUE(at::equal(parameters[i].grad(), file().tensor(fmt::format("{}/{}", name, i))))
              << name << " " << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace ppfsdp::golden
