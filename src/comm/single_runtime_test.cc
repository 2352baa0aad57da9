// A world of one rank: collectives are copies, and storages can be freed and made again under views
// and tensors saved for backward.
#include "src/comm/single_runtime.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>

#include "src/comm/communicator.h"
#include "src/comm/eager_stream.h"

namespace ppfsdp::comm {
namespace {

TEST(SingleRuntime, is_a_world_of_one) {
  const auto runtime = make_single_runtime();
  EXPECT_EQ(runtime->rank(), 0);
  EXPECT_EQ(runtime->world_size(), 1);
  EXPECT_EQ(runtime->backend(), "single");
  EXPECT_TRUE(runtime->device().is_cpu());
  EXPECT_EQ(runtime->world()->size(), 1);
  EXPECT_EQ(runtime->world()->subgroup({0}, "shard")->name(), "shard");
  EXPECT_THROW(make_single_runtime(c10::Device(c10::kCUDA)), c10::Error);
}

TEST(SingleRuntime, collectives_copy) {
  const auto runtime = make_single_runtime();
  Communicator& world = *runtime->world();
  Stream& stream = runtime->compute_stream();
  const at::Tensor input = at::arange(1, 6, at::kFloat);
  at::Tensor output = at::zeros({5});
  world.all_gather_into(output, input, stream);
  EXPECT_TRUE(output.equal(input));
  output.zero_();
  world.reduce_scatter(output, input, ReduceOp::avg(), stream);
  EXPECT_TRUE(output.equal(input));
  world.reduce_scatter(output, input, ReduceOp::premul_sum(0.5), stream);
  EXPECT_TRUE(output.equal(input.mul(0.5)));
  output.zero_();
  world.all_to_all(output, input, {5}, {5}, stream);
  EXPECT_TRUE(output.equal(input));
  world.all_reduce(output, ReduceOp::premul_sum(2.0), stream);
  EXPECT_TRUE(output.equal(input.mul(2)));
  world.all_reduce(output, ReduceOp::max(), stream);
  world.broadcast(output, 0, stream);
  EXPECT_TRUE(output.equal(input.mul(2)));
  world.all_gather_into(output, output, stream);
  EXPECT_TRUE(output.equal(input.mul(2)));
  world.barrier();
  EXPECT_EQ(world.sequence(), 9u);
  EXPECT_THROW(world.all_to_all(output, at::zeros({4}), {5}, {4}, stream), c10::Error);
}

TEST(SingleRuntime, meta_tensors_are_not_touched) {
  const auto runtime = make_single_runtime(c10::Device(c10::kMeta));
  Communicator& world = *runtime->world();
  Stream& stream = runtime->compute_stream();
  const at::Tensor a = at::empty({4}, at::kMeta), b = at::empty({4}, at::kMeta);
  world.all_gather_into(a, b, stream);
  world.reduce_scatter(a, b, ReduceOp::premul_sum(0.5), stream);
  world.all_reduce(a, ReduceOp::sum(), stream);
  EXPECT_THROW(world.all_reduce(at::zeros({4}), ReduceOp::sum(), stream), c10::Error);
  runtime->free_storage(a);
  EXPECT_EQ(a.storage().nbytes(), 0u);
  runtime->alloc_storage(a);
  EXPECT_EQ(a.storage().nbytes(), 16u);
}

TEST(SingleRuntime, streams_run_at_once) {
  const auto runtime = make_single_runtime();
  const auto stream = runtime->create_stream("side", StreamPriority::kHigh);
  EXPECT_EQ(stream->name(), "side");
  int value = 0;
  stream->run([&] { value = 1; });
  EXPECT_EQ(value, 1);
  const EventPtr event = stream->record();
  event->synchronize();
  stream->wait(event);
  stream->wait(nullptr);
  stream->synchronize();
  EXPECT_THROW(stream->run([] { throw std::runtime_error("x"); }), std::runtime_error);
}

/// An event that counts who waits for it.
struct CountingEvent : Event {
  int waits = 0;
  void synchronize() override { ++waits; }
};

TEST(EagerStream, waits_on_the_calling_thread) {
  // Work behind the wait runs at once, so the wait itself must block.
  EagerStream stream("side");
  const auto event = std::make_shared<CountingEvent>();
  stream.wait(event);
  EXPECT_EQ(event->waits, 1);
}

TEST(Runtime, storage_goes_and_comes_back_under_views) {
  const auto runtime = make_single_runtime();
  const at::Tensor whole = at::arange(12, at::kFloat);
  const at::Tensor view = whole.narrow(0, 4, 6).view({2, 3});
  const auto version = whole.unsafeGetTensorImpl()->version_counter().current_version();
  runtime->free_storage(whole);
  EXPECT_EQ(whole.storage().nbytes(), 0u);
  EXPECT_EQ(view.storage().nbytes(), 0u) << "a view shares the storage";
  EXPECT_EQ(view.sizes(), (at::IntArrayRef{2, 3}));
  runtime->alloc_storage(whole);
  EXPECT_EQ(whole.storage().nbytes(), 48u);
  whole.copy_(at::arange(12, at::kFloat).mul(2));
  EXPECT_EQ(view[1][2].item<float>(), 18.0f);
  const void* data = whole.const_data_ptr();
  runtime->alloc_storage(whole);
  EXPECT_EQ(whole.const_data_ptr(), data) << "memory that is there must stay";
  EXPECT_EQ(whole.unsafeGetTensorImpl()->version_counter().current_version(), version + 1)
      << "only copy_ may count as a write";
}

TEST(Runtime, tensors_saved_for_backward_come_back_to_life) {
  const auto runtime = make_single_runtime();
  const at::Tensor weight = at::full({3}, 5.0);
  const at::Tensor x = at::ones({3}).requires_grad_();
  const at::Tensor y = x.mul(weight).sum();
  runtime->free_storage(weight);
  runtime->alloc_storage(weight);
  weight.variable_data().fill_(7.0);
  y.backward();
  EXPECT_TRUE(x.grad().equal(at::full({3}, 7.0)));
}

TEST(Runtime, storage_bytes_counts_offset_and_strides) {
  const at::Tensor base = at::zeros({4, 6});
  EXPECT_EQ(storage_bytes(base), 96u);
  EXPECT_EQ(storage_bytes(base.narrow(0, 1, 2)), 4u * 18);
  EXPECT_EQ(storage_bytes(base.t().narrow(0, 0, 2)), 4u * 20);
  EXPECT_EQ(storage_bytes(base.narrow(0, 1, 0)), 0u);
  EXPECT_EQ(storage_bytes(at::zeros({}, at::kDouble)), 8u);
}

TEST(Runtime, storage_of_nothing_is_refused) {
  const auto runtime = make_single_runtime();
  EXPECT_THROW(runtime->free_storage(at::Tensor()), c10::Error);
  EXPECT_THROW(runtime->alloc_storage(at::Tensor()), c10::Error);
  EXPECT_THROW(runtime->free_storage(at::zeros({2, 2}).to_sparse()), c10::Error);
}

// Wrong when a stream or group without memory of its own gives a tensor of other numbers.
TEST(Runtime, streams_and_groups_make_tensors_where_they_are_used) {
  for (const c10::DeviceType type : {at::kCPU, at::kMeta}) {
    const auto runtime = make_single_runtime(c10::Device(type));
    Stream& stream = runtime->compute_stream();
    const at::Tensor made = stream.empty({2, 3}, at::TensorOptions(at::kHalf).device(type));
    EXPECT_EQ(made.sizes(), (at::IntArrayRef{2, 3}));
    EXPECT_EQ(made.scalar_type(), at::kHalf);
    const at::Tensor allocated = runtime->world()->allocate(5, at::kBFloat16, stream);
    EXPECT_EQ(allocated.sizes(), at::IntArrayRef{5});
    EXPECT_EQ(allocated.scalar_type(), at::kBFloat16);
    EXPECT_EQ(allocated.device().type(), type);
    EXPECT_THROW(runtime->world()->allocate(-1, at::kFloat, stream), c10::Error);
  }
}

TEST(Runtime, only_a_gpu_has_a_grid) {
  EXPECT_THROW(make_single_runtime()->device_grid(), c10::Error);
}

// Wrong when the default counts pages for bytes, or gives the machine's memory for the process's.
TEST(Runtime, memory_use_is_the_processs) {
  const auto runtime = make_single_runtime();
  constexpr int64_t kBytes = 64 << 20;
  const at::Tensor held = at::ones({kBytes}, at::kByte);
  const MemoryUse use = runtime->memory_use();
  EXPECT_GE(use.peak_bytes, kBytes);
  EXPECT_LT(use.peak_bytes, use.total_bytes);
}

}  // namespace
}  // namespace ppfsdp::comm
