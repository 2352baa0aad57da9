#include "src/dtensor/dtensor_impl.h"

// What LibTorch itself does with a DTensor: each test holds a fact that the design stands on, and
// that another version of LibTorch could change.
#include <ATen/ATen.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/serialize.h>

#include <sstream>
#include <thread>
#include <utility>

#include "src/dtensor/dtensor.h"
#include "src/dtensor/testing.h"

namespace ppfsdp::dtensor {
namespace {

using testing::difference;
using testing::integers;
using testing::kR;
using testing::on_mesh;
using testing::S;

at::Tensor sharded_leaf(const mesh::DeviceMeshPtr& mesh) {
  return distribute_tensor(integers({5, 3}, 1), mesh, {S(0)}).requires_grad_();
}

// Gradient formulas take their out-of-place forms for tensors that are like subclasses; otherwise
// they fill plain buffers in place.
TEST(DTensorImpl, takes_a_dtensor_for_a_tensor_subclass_on_its_real_device) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor x = sharded_leaf(mesh);
    EXPECT_TRUE(at::isTensorSubclassLike(x));
    EXPECT_EQ(x.device(), at::Device(at::kCPU));
    EXPECT_EQ(x.options().device(), at::Device(at::kCPU));
  });
}

/// A tensor that says to be on a GPU, without memory there.
at::Tensor on_gpu(at::IntArrayRef sizes) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                                   caffe2::TypeMeta::Make<float>(),
                                                   at::Device(at::kCUDA, 3));
  impl->set_sizes_contiguous(sizes);
  return at::Tensor(std::move(impl));
}

// The engine takes a gradient's stream and thread from its device, autocast its dtypes from the
// autocast key of that device; autograd's key is the same for every device, since LibTorch has one
// set of formulas, which end in our fallback.
TEST(DTensorImpl, is_where_its_parts_are) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor x = make_dtensor(
        on_gpu({2, 3}),
        make_spec(mesh, {S(0)}, at::IntArrayRef({4, 3}), at::IntArrayRef({3, 1}), at::kFloat));
    EXPECT_EQ(x.device(), at::Device(at::kCUDA, 3));
    EXPECT_TRUE(x.is_cuda());
    EXPECT_FALSE(x.is_meta());
    EXPECT_EQ(x.options().device(), at::Device(at::kCUDA, 3));
    EXPECT_TRUE(x.key_set().has(c10::DispatchKey::AutocastCUDA));
    EXPECT_FALSE(x.key_set().has(c10::DispatchKey::AutocastCPU));
    EXPECT_EQ(x.key_set().has(c10::DispatchKey::AutogradMeta),
              sharded_leaf(mesh).key_set().has(c10::DispatchKey::AutogradMeta));
    EXPECT_TRUE(at::isTensorSubclassLike(x));
    EXPECT_EQ(x.detach().device(), at::Device(at::kCUDA, 3));
  });
}

// Where streams differ, the engine asks a gradient for its memory, and torch::save at any other
// time, which must not get it.
TEST(DTensorImpl, has_memory_in_backward_off_the_cpu) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    at::Tensor x = from_local(at::ones({2, 3}, at::TensorOptions(at::kMeta)), mesh, {S(0)});
    x.set_requires_grad(true);
    int calls = 0;
    x.register_hook([&](const at::Tensor& gradient) {
      ++calls;
      EXPECT_FALSE(gradient.has_storage());
      EXPECT_TRUE(gradient.storage().is_alias_of(local_of(gradient).storage()));
    });
    (x * 2).backward(at::ones_like(x));
    EXPECT_EQ(calls, 1);
    EXPECT_ANY_THROW(x.storage());
    EXPECT_ANY_THROW(x.grad().storage());
  });
}

// One shard written under global sizes would be a checkpoint that nobody can tell from a right one.
TEST(DTensorImpl, refuses_to_serialise_or_print) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor x = sharded_leaf(mesh).detach();
    std::ostringstream stream;
    EXPECT_ANY_THROW(torch::save(x, stream));
    EXPECT_ANY_THROW(stream << x);
  });
}

TEST(DTensorImpl, autocast_casts_dtensors) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor x = sharded_leaf(mesh);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    const at::Tensor product = x.mm(distribute_tensor(integers({3, 2}, 2), mesh, {kR}));
    at::autocast::set_autocast_enabled(at::kCPU, false);
    EXPECT_EQ(product.scalar_type(), at::kBFloat16);
    product.sum().backward();
    EXPECT_EQ(x.grad().scalar_type(), at::kFloat);
  });
}

struct Doubled : torch::autograd::Function<Doubled> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return x * 2;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    EXPECT_TRUE(is_dtensor(context->get_saved_variables()[0]));
    return {gradients[0] * 2};
  }
};

TEST(DTensorImpl, custom_functions_and_final_callbacks) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor x = sharded_leaf(mesh);
    int callbacks = 0;
    const std::thread::id rank_thread = std::this_thread::get_id();
    x.register_hook([&](const at::Tensor&) {
      torch::autograd::Engine::get_default_engine().queue_callback([&] {
        ++callbacks;
        EXPECT_EQ(std::this_thread::get_id(), rank_thread);
      });
    });
    Doubled::apply(x).sum().backward();
    EXPECT_EQ(callbacks, 1);
    EXPECT_EQ(difference(full_tensor(x.grad()), at::full({5, 3}, 2.0F)), "");
  });
}

// Two users of one leaf: the engine cannot steal the gradient, so it copies and then adds.
TEST(DTensorImpl, accumulates_a_gradient_that_is_still_in_use) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor x = sharded_leaf(mesh);
    const at::Tensor seed = distribute_tensor(at::ones({5, 3}), mesh, {S(0)});
    (x + 0).backward(seed);
    x.add(0).backward(seed);
    EXPECT_EQ(difference(full_tensor(x.grad()), at::full({5, 3}, 2.0F)), "");
    EXPECT_EQ(difference(full_tensor(seed), at::ones({5, 3})), "");
    EXPECT_EQ(spec_of(x.grad())->placements, Placements{S(0)});
  });
}

}  // namespace
}  // namespace ppfsdp::dtensor
