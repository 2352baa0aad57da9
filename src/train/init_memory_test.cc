// What a rank holds while a model comes to be, as LibTorch's allocator sees it.
#include <ATen/core/grad_mode.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "sim/mesh/world.h"
#include "src/checkpoint/safetensors.h"
#include "src/dtensor/dtensor.h"
#include "src/train/rank_memory.h"
#include "src/train/recipe.h"
#include "src/train/test_util.h"

namespace ppfsdp::train {
namespace {

/// Bytes of LibTorch's host memory that the code of one thread asked for.
struct Usage {
  int64_t live = 0, peak = 0;
};

thread_local Usage* current_usage = nullptr;

/// LibTorch's own allocator, which keeps account for the thread that allocates. A simulated rank is
/// a thread, and one runs at a time.
class CountingAllocator : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator* inner) : inner_(inner) {}

  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr data = inner_->allocate(bytes);
    void* address = data.get();
    const c10::Device device = data.device();
    auto* block = new Block{std::move(data), static_cast<int64_t>(bytes), current_usage};
    if (block->usage != nullptr) {
      block->usage->live += block->bytes;
      block->usage->peak = std::max(block->usage->peak, block->usage->live);
    }
    return {address, block, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  struct Block {
    c10::DataPtr data;
    int64_t bytes;
    Usage* usage;
  };
  static void free_block(void* address) {
    const std::unique_ptr<Block> block(static_cast<Block*>(address));
    if (block->usage != nullptr) block->usage->live -= block->bytes;
  }

  c10::Allocator* inner_;
};

class InitMemoryTest : public FolderTest {
 protected:
  InitMemoryTest() : plain_(c10::GetCPUAllocator()), counting_(plain_) {
    c10::SetCPUAllocator(&counting_, /*priority=*/1);
  }
  ~InitMemoryTest() override { c10::SetCPUAllocator(plain_, /*priority=*/1); }

  /// Twelve blocks, so that the model is far more than a shard and a block; rows that 4 ranks do
  /// not divide.
  Config config() const {
    Config config;
    config.model.dim = 60;
    config.model.layers = 12;
    config.model.heads = 6;
    config.model.hidden = 150;
    config.data.seq_len = 16;
    config.parallelism.ranks = 4;
    return config;
  }

  /// The peak of each rank while `fn` runs; tensors that it makes may outlive it.
  std::vector<int64_t> peaks(int ranks, const std::function<void(comm::Runtime&)>& fn) {
    // Blocks outlive the worlds, say in LibTorch's caches.
    static std::vector<std::unique_ptr<std::vector<Usage>>> kept;
    kept.push_back(std::make_unique<std::vector<Usage>>(ranks));
    std::vector<Usage>& usages = *kept.back();
    sim::run_world(ranks, {}, [&](comm::Runtime& runtime) {
      current_usage = &usages[runtime.rank()];
      fn(runtime);
      current_usage = nullptr;
    });
    std::vector<int64_t> result;
    for (const Usage& usage : usages) result.push_back(usage.peak);
    return result;
  }

  c10::Allocator* plain_;
  CountingAllocator counting_;
};

// Scalars, the rotary table (16 x 5 complex64) twice, and what communication sets up.
constexpr int64_t kSlack = 16 << 10;

// The claim of meta-device init: beside its shards a rank never holds more than one block, from the
// first line to the initial values, however many blocks there are.
TEST_F(InitMemoryTest, ARankHoldsItsShardsAndAtMostOneBlock) {
  const Config config = this->config();
  int64_t shards = 0, block = 0, whole = 0;
  const std::vector<int64_t> peak = peaks(4, [&](comm::Runtime& runtime) {
    nn::Llama model = make_meta_model(config);
    shard(config, model, runtime);
    EXPECT_EQ(current_usage->peak <= kSlack, true) << "nothing before to_empty";
    initialize(config, model, runtime);
    const RankMemory memory = count_rank_memory(config, runtime);
    shards = memory.parameter_bytes;
    block = memory.largest_group_bytes;
    whole = 4 * memory.parameters;
    EXPECT_GE(current_usage->live, shards);
  });
  for (const int64_t bytes : peak) EXPECT_LE(bytes, shards + block + kSlack);
  // The bound would catch a rank that holds the model: what building it in one go takes.
  const std::vector<int64_t> plain =
      peaks(1, [&](comm::Runtime&) { const nn::Llama model = make_model(config); });
  EXPECT_GE(plain[0], whole);
  EXPECT_GT(whole, 2 * (shards + block + kSlack));
}

// A load holds one parameter's part beside the shards, on the rank that reads for all as well.
TEST_F(InitMemoryTest, ALoadHoldsOnePartBesideTheShards) {
  Config config = this->config();
  int64_t largest = 0;
  {
    std::vector<std::pair<std::string, at::Tensor>> values;
    for (const auto& item : make_model(config)->named_parameters()) {
      values.emplace_back(item.key(), item.value().detach());
      largest = std::max(largest, static_cast<int64_t>(item.value().nbytes()));
    }
    config.model.weights = path("model.safetensors");
    checkpoint::save_safetensors(config.model.weights, values);
  }
  for (const char* reader : {"every_rank", "rank_zero"}) {
    config.model.weights_reader = reader;
    int64_t shards = 0, block = 0;
    const std::vector<int64_t> peak = peaks(4, [&](comm::Runtime& runtime) {
      nn::Llama model = make_meta_model(config);
      shard(config, model, runtime);
      initialize(config, model, runtime);
      const RankMemory memory = count_rank_memory(config, runtime);
      shards = memory.parameter_bytes;
      block = memory.largest_group_bytes;
    });
    // A part as it is read, converted, and on its way: far below the block of initial values.
    ASSERT_LT(3 * largest / 4, block);
    for (const int64_t bytes : peak) EXPECT_LE(bytes, shards + block + kSlack) << reader;
  }
}

bool sanitized() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return true;
#else
  return false;
#endif
}

// 27 GB of float32 on eight ranks, counted without any of it.
TEST_F(InitMemoryTest, SevenBillionParametersTakeNoMemoryOnMeta) {
  Config config;
  config.model.name = "llama2-7b";
  config.data.seq_len = 2048;
  config.parallelism.ranks = 8;
  std::vector<RankMemory> counted(8);
  const std::vector<int64_t> peak = peaks(8, [&](comm::Runtime& runtime) {
    nn::Llama model = make_meta_model(config);
    shard(config, model, runtime);
    runtime.world()->barrier();  // all eight at once
    int64_t elements = 0;
    for (const at::Tensor& parameter : model->parameters()) {
      elements += dtensor::local_of(parameter).numel();
    }
    EXPECT_EQ(elements, 6'738'415'616 / 8);
    counted[runtime.rank()] = count_rank_memory(config, runtime);
  });
  for (const RankMemory& memory : counted) {
    EXPECT_EQ(memory.parameters, 6'738'415'616);
    EXPECT_EQ(memory.groups, 33);
    // Every size but that of the 11008 hidden rows, 1376 each, is a multiple of 8 as well.
    EXPECT_EQ(memory.parameter_bytes, 6'738'415'616 / 8 * 4);
    EXPECT_EQ(memory.optimizer_bytes, 2 * memory.parameter_bytes);
    EXPECT_EQ(memory.largest_group_bytes, (2 * 32000 * 4096 + 4096) * int64_t{4});
  }
  for (const int64_t bytes : peak) EXPECT_LE(bytes, 64 << 10);
  rusage process{};
  ASSERT_EQ(getrusage(RUSAGE_SELF, &process), 0);
  // In KiB. A sanitizer's own memory is larger.
  if (!sanitized()) {
    EXPECT_LT(process.ru_maxrss, 1 << 20);
  }
}

}  // namespace
}  // namespace ppfsdp::train
