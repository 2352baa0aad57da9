// Shows that the headers and the libraries which the build found belong together and work: a
// mismatch would otherwise first appear as a crash somewhere in the project's own tests.
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <torch/csrc/api/include/torch/version.h>

#include <string>
#include <thread>
#include <vector>

namespace {

// Wrong when the headers come from another version than libtorch_cpu.so.
TEST(LibTorch, LibraryHasTheHeadersVersion) {
  EXPECT_NE(at::show_config().find(std::string("TORCH_VERSION=") + TORCH_VERSION),
            std::string::npos)
      << "headers are " << TORCH_VERSION << ", the library says:\n"
      << at::show_config();
}

// Wrong when a kernel library is missing or autograd's engine does not start.
TEST(LibTorch, BackwardOfAMatrixProduct) {
  at::Tensor a = at::randn({3, 4}).requires_grad_();
  at::Tensor b = at::randn({4, 2});
  at::matmul(a, b).sum().backward();
  EXPECT_TRUE(at::allclose(a.grad(), at::matmul(at::ones({3, 2}), b.t())));
}

// Wrong when two threads can not run backward at once, as the simulated mesh's ranks do.
TEST(LibTorch, BackwardOnTwoThreads) {
  std::vector<at::Tensor> grads(2);
  std::vector<std::thread> threads;
  threads.reserve(grads.size());
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([i, &grads] {
      at::Tensor a = at::ones({5}).requires_grad_();
      a.mul(a).sum().backward();
      grads[i] = a.grad();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const at::Tensor& grad : grads) EXPECT_TRUE(at::allclose(grad, at::full({5}, 2.0)));
}

}  // namespace
