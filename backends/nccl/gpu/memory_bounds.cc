#include "backends/nccl/gpu/memory_bounds.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "src/dtensor/dtensor.h"

namespace ppfsdp::nccl::testing {
namespace {

/// Allocations of a step that are large enough for an allocator to round them up generously: a
/// buffer for each group's gradients and a few for what is gathered, and a block's gradients.
constexpr int64_t kLargeAllocations = 40;

/// Activations that forward keeps for backward, and logits with their gradients: of each token and
/// block at most 40 values of the residual stream's width, 8 of the feed-forward network's and 4 of
/// each head's row of attention, in float32.
int64_t activations(const TrainingOptions& options) {
  const nn::LlamaConfig& model = options.model;
  const int64_t tokens = options.batch * model.max_seq_len;
  const int64_t block =
      40 * model.dim + 8 * model.ffn_hidden_dim() + 4 * model.n_heads * model.max_seq_len;
  return 4 * tokens * (model.n_layers * block + 6 * model.vocab_size);
}

}  // namespace

std::vector<Phase> measure_phases(const TrainingOptions& options, comm::Runtime& runtime,
                                  const MemoryMeter& meter, int64_t slack) {
  TORCH_CHECK(!options.policy.param_dtype && !options.policy.reduce_dtype &&
                  options.optimizer == optim::Implementation::kFused,
              "measure_phases: the bounds are those of float32 and the fused optimizer");
  Training training(options, runtime);
  // Workspaces and states are there from now on.
  for (int step = 0; step < 2; ++step) training.step();

  const int64_t all = nn::parameter_count(options.model) * int64_t{sizeof(float)};
  const nn::LlamaConfig& model = options.model;
  const int64_t non_block = (2 * model.vocab_size * model.dim + model.dim) * int64_t{sizeof(float)};
  const int64_t block = (all - non_block) / model.n_layers;
  int64_t sharded = 0;
  for (const at::Tensor& parameter : training.parameters()) {
    sharded += static_cast<int64_t>(dtensor::local_of(parameter).nbytes());
  }
  const int64_t allowance = activations(options) + kLargeAllocations * slack;

  std::vector<Phase> phases;
  const auto measure = [&](const char* name, int64_t others, int64_t bound,
                           const std::function<void()>& part) {
    meter.reset();
    part();
    phases.push_back({name, meter.peak() - others, bound + allowance});
  };
  // Shards and their gradients are there, and what is counted as others.
  const int64_t others = meter.now() - 2 * sharded;
  measure("forward", others, 3 * block + non_block + sharded, [&] { training.forward(); });
  measure("backward", others, 4 * block + non_block + 2 * sharded, [&] { training.backward(); });
  measure("optimizer", others - 2 * sharded, 4 * sharded, [&] {
    training.clip();
    training.optimize();
  });
  return phases;
}

}  // namespace ppfsdp::nccl::testing
