#include "src/train/rank_memory.h"

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <unordered_set>
#include <vector>

#include "src/dtensor/dtensor.h"
#include "src/nn/llama.h"
#include "src/train/memory_need.h"
#include "src/train/recipe.h"

namespace ppfsdp::train {
namespace {

const at::Tensor& local_of(const at::Tensor& tensor) {
  return dtensor::is_dtensor(tensor) ? dtensor::local_of(tensor) : tensor;
}

}  // namespace

RankMemory count_rank_memory(const Config& config, comm::Runtime& runtime) {
  const at::ScalarType compute = mixed_precision(config.training).param_dtype.value_or(at::kFloat);
  const auto gathered = [&](const std::vector<at::Tensor>& parameters) {
    int64_t elements = 0;
    for (const at::Tensor& parameter : parameters) elements += parameter.numel();
    return elements * static_cast<int64_t>(c10::elementSize(compute));
  };
  RankMemory memory;
  nn::Llama model = make_meta_model(config);
  if (config.communication.backend != "single") {
    // The root's group is what the blocks' leave.
    int64_t root = gathered(model->parameters());
    for (nn::LlamaBlock& block : model->blocks()) {
      const int64_t bytes = gathered(block->parameters());
      memory.largest_group_bytes = std::max(memory.largest_group_bytes, bytes);
      root -= bytes;
    }
    memory.largest_group_bytes = std::max(memory.largest_group_bytes, root);
    memory.groups = static_cast<int64_t>(model->blocks().size()) + 1;
    shard(config, model, runtime);
  }
  int64_t shard_bytes = 0;
  std::unordered_set<const c10::StorageImpl*> seen;
  for (const at::Tensor& parameter : model->parameters()) {
    memory.parameters += parameter.numel();
    const at::Tensor& local = local_of(parameter);
    shard_bytes += static_cast<int64_t>(local.nbytes());
    const c10::Storage& storage = local.storage();
    if (seen.insert(storage.unsafeGetStorageImpl()).second) {
      memory.parameter_bytes += static_cast<int64_t>(storage.nbytes());
    }
  }
  memory.gradient_bytes = memory.parameter_bytes;
  memory.optimizer_bytes = static_cast<double>(shard_bytes) * state_values(config.optimizer);
  return memory;
}

}  // namespace ppfsdp::train
