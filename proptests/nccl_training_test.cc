// Sharded training on the NCCL backend, over fake devices whose streams really run later and a fake
// NCCL that really moves and reduces (see backends/nccl/fake): equal to one device's bit for bit,
// with NCCL's own rounding of averages, and without a wait of the host for the device.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randint.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <chrono>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "backends/nccl/testing/thread_world.h"
#include "proptests/draw_llama_case.h"
#include "proptests/llama_case.h"
#include "sim/mesh/world.h"
#include "src/fsdp/fully_shard.h"
#include "src/mesh/device_mesh.h"
#include "src/nn/llama.h"
#include "src/nn/loss.h"
#include "src/optim/adamw.h"
#include "src/optim/clip_grad_norm.h"

namespace ppfsdp::proptests {
namespace {

using nccl::testing::HostWaits;
using nccl::testing::NcclCall;
using nccl::testing::ThreadWorld;
using nccl::testing::ThreadWorldOptions;
using ::testing::IsEmpty;

ThreadWorldOptions make_options(bool late, uint64_t seed, uint64_t checked) {
  ThreadWorldOptions options;
  options.settings.timeout = std::chrono::seconds(50);
  options.settings.poll = std::chrono::milliseconds(20);
  options.settings.report = std::chrono::milliseconds(100);
  options.settings.checked = checked;
  options.devices.late = late;
  options.devices.seed = seed;
  return options;
}

std::string describe(const ThreadWorldOptions& options) {
  return fmt::format("late={} stream_seed={} checked={} polls={}", options.devices.late,
                     options.devices.seed, options.settings.checked, options.polls);
}

/// The first thing in which a run over the fakes differs from `want`, or what else was wrong.
std::string find_difference(const LlamaCase& c, const ThreadWorldOptions& options,
                            const std::vector<LlamaResult>& want) {
  std::vector<std::string> differences(c.world);
  ThreadWorld world(c.world, options);
  const auto errors = world.run([&](nccl::NcclRuntime& runtime) {
    differences[runtime.rank()] = first_difference(train_sharded(c, runtime), want[runtime.rank()]);
  });
  for (const auto& texts : {errors, differences}) {
    for (const std::string& text : texts) {
      if (!text.empty()) return text;
    }
  }
  const auto faults = world.find_faults();
  return faults.empty() ? "" : faults.front();
}

LlamaCase small_case(int world) {
  LlamaCase c;
  c.world = world;
  c.model.vocab_size = 29;
  c.model.dim = 12;
  c.model.n_heads = 3;
  c.model.n_kv_heads = 1;
  c.model.n_layers = 3;
  c.model.hidden_dim = 17;
  c.model.max_seq_len = c.seq;
  c.mesh.order = comm::ReductionOrder::kNcclRing;
  c.reshard = true;
  return c;
}

// On the simulated mesh in NCCL's order: a stale gather, a lost or misplaced gradient, another
// average, a buffer used again too early, a missing wait all show as other bits.
TEST(NcclTraining, EqualsTheSimulatedMeshBitForBit) {
  for (const int world : {1, 2, 3, 4}) {
    for (const bool bf16 : {false, true}) {
      LlamaCase c = small_case(world);
      c.microbatches = 2;
      if (bf16) c.policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
      std::vector<LlamaResult> want(world);
      sim::run_world(world, c.mesh, [&](comm::Runtime& runtime) {
        want[runtime.rank()] = train_sharded(c, runtime);
      });
      for (const bool group_memory : {false, true}) {
        c.group_memory = group_memory;
        for (const ThreadWorldOptions& options :
             {make_options(false, 0, 256), make_options(true, 0, 0), make_options(true, 5, 20)}) {
          EXPECT_EQ(find_difference(c, options, want), "") << c.str() << " " << describe(options);
        }
      }
    }
  }
}

// The same for models, dtypes, reshard flags, schedules that are drawn, against one device.
TEST(NcclTraining, EqualsOneDeviceBitForBit) {
  int late = 0, group_memory = 0, odd = 0;
  const auto property = [&] {
    LlamaCase c = draw_llama_case(5);
    c.mesh.order = comm::ReductionOrder::kNcclRing;
    c.group_memory = draw(0, 1) == 0;
    ThreadWorldOptions options = make_options(draw(0, 2) > 0, draw(0, 1000), draw(0, 40));
    options.polls = draw(0, 3);
    RC_LOG() << "replay: " << c.str() << " " << describe(options) << "\n";
    const std::string difference = find_difference(c, options, train_reference(c));
    if (!difference.empty()) throw std::runtime_error(difference);
    late += options.devices.late ? 1 : 0;
    group_memory += c.group_memory ? 1 : 0;
    odd += c.world == 3 || c.world == 5 ? 1 : 0;
  };
  EXPECT_TRUE(rc::check("sharded training over the fake NCCL equals one device's", property));
  // The cases must have been worth drawing.
  EXPECT_GT(late, 20);
  EXPECT_GT(group_memory, 20);
  EXPECT_GT(odd, 15);
}

// Were it otherwise, the two tests above could not fail for a wait that training lacks. Waits for
// the compute stream, about half of all, do not show here, since the host has done that stream's
// work when it comes to them (they show on the simulated mesh); nor do those that another implies.
TEST(NcclTraining, AMissingWaitShows) {
  LlamaCase c = small_case(2);
  std::vector<LlamaResult> want(c.world);
  sim::run_world(c.world, c.mesh,
                 [&](comm::Runtime& runtime) { want[runtime.rank()] = train_sharded(c, runtime); });
  int seen = 0;
  for (int wait = 1; wait <= 60; ++wait) {
    ThreadWorldOptions options = make_options(true, 0, 0);
    options.devices.patience = std::chrono::milliseconds(200);
    options.devices.dropped_wait = static_cast<uint64_t>(wait);
    seen += find_difference(c, options, want).empty() ? 0 : 1;
  }
  // About ten; how many depends on how the ranks overlap.
  EXPECT_GE(seen, 3);
}

/// One rank's model, as a trainer has it.
struct Trainee {
  nn::Llama model;
  std::vector<at::Tensor> parameters;
  optim::AdamW optimizer;
  int64_t seq;

  static nn::Llama sharded(const LlamaCase& c, comm::Runtime& runtime) {
    nn::Llama model(c.model);
    auto generator = at::detail::createCPUGenerator(1);
    {
      const c10::NoGradGuard no_grad;
      for (at::Tensor parameter : model->parameters()) parameter.normal_(0.05, 0.3, generator);
    }
    const fsdp::FullyShardOptions options{.mesh = mesh::DeviceMesh::create(runtime, {c.world}),
                                          .reshard_after_forward = c.reshard,
                                          .mp_policy = c.policy};
    for (nn::LlamaBlock& block : model->blocks()) {
      fsdp::fully_shard(*block, options)
          .set_allocate_memory_from_process_group_for_comm(c.group_memory);
    }
    fsdp::fully_shard(*model, options)
        .set_allocate_memory_from_process_group_for_comm(c.group_memory);
    return model;
  }

  Trainee(const LlamaCase& c, comm::Runtime& runtime)
      : model(sharded(c, runtime)),
        parameters(model->parameters()),
        optimizer(parameters, optim::AdamWOptions{.lr = 0.01}),
        seq(c.seq) {}

  void step(const at::Tensor& tokens) {
    const at::Tensor logits = model(tokens.narrow(1, 0, seq).contiguous());
    nn::next_token_loss(logits, tokens.narrow(1, 1, seq).contiguous()).backward();
    optim::clip_grad_norm_(parameters, 1.0);
    optimizer.step();
    optimizer.zero_grad();
  }
};

// Every wait of the host for a GPU leaves it idle while the next kernels are issued.
TEST(NcclTraining, AStepMakesTheHostWaitForNothing) {
  constexpr uint64_t kChecked = 30;
  for (const int size : {1, 2, 4}) {
    for (const bool group_memory : {false, true}) {
      for (const bool bf16 : {false, true}) {
        LlamaCase c = small_case(size);
        c.group_memory = group_memory;
        if (bf16) c.policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
        ThreadWorld world(size, make_options(true, 0, kChecked));
        const auto errors = world.run([&](nccl::NcclRuntime& runtime) {
          const int rank = runtime.rank();
          Trainee trainee(c, runtime);
          auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(rank));
          const auto step = [&] {
            trainee.step(at::randint(c.model.vocab_size, {1, c.seq + 1}, generator));
          };
          // Alone in the world nothing is compared, and little communicated.
          do step();
          while (size > 1 && runtime.world()->sequence() <= kChecked);
          step();
          const uint64_t waits = runtime.host_waits();
          const uint64_t first = runtime.world()->sequence();
          const HostWaits before = world.devices().host_waits(rank);
          // More than 64 operations, of which one is compared.
          int steps = 0;
          do step();
          while (++steps < 12 && (size == 1 || runtime.world()->sequence() < first + 64));
          const HostWaits after = world.devices().host_waits(rank);
          EXPECT_EQ(after.streams - before.streams, 0u);
          EXPECT_EQ(after.events - before.events, 0u);
          EXPECT_EQ(after.devices - before.devices, 0u);
          EXPECT_EQ(after.polls - before.polls, 0u);
          EXPECT_EQ(after.scalars - before.scalars, 0u) << "a tensor's value is read";
          EXPECT_EQ(runtime.host_waits(), waits);
          if (size > 1) {
            EXPECT_GE(runtime.world()->sequence(), first + 64);
          }
        });
        EXPECT_THAT(errors, ::testing::Each(IsEmpty()));
        EXPECT_THAT(world.find_faults(), IsEmpty());
      }
    }
  }
}

// What NCCL would copy without staging: all gathers' and reduce-scatters' memory is registered, and
// a step in which nothing grows asks for none.
TEST(NcclTraining, RegisteredMemoryIsMadeOnce) {
  LlamaCase c = small_case(2);
  c.group_memory = true;
  ThreadWorld world(2, make_options(false, 0, 0));
  world.run([&](nccl::NcclRuntime& runtime) {
    Trainee trainee(c, runtime);
    auto generator = at::detail::createCPUGenerator(7);
    const auto count = [&] {
      std::map<std::string, int> counts;
      for (const NcclCall& call : world.nccl().calls(runtime.rank())) ++counts[call.function];
      return counts;
    };
    const auto step = [&] {
      trainee.step(at::randint(c.model.vocab_size, {1, c.seq + 1}, generator));
    };
    for (int i = 0; i < 3; ++i) step();
    const auto before = count();
    EXPECT_GT(before.at("MemAlloc"), 0);
    EXPECT_EQ(before.at("MemAlloc"), before.at("CommRegister"));
    for (int i = 0; i < 3; ++i) step();
    const auto after = count();
    EXPECT_GT(after.at("AllGather"), before.at("AllGather"));
    EXPECT_EQ(after.at("MemAlloc"), before.at("MemAlloc"));
  });
  EXPECT_THAT(world.find_faults(), IsEmpty());
}

}  // namespace
}  // namespace ppfsdp::proptests
