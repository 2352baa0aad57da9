#include "src/comm/host_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <mutex>
#include <utility>

namespace ppfsdp::comm {
namespace {

/// Of tensors' memory, as LibTorch's own allocator keeps it.
constexpr size_t kAlignment = 64;
constexpr size_t kSmallest = 64;
constexpr size_t kLargest = size_t{1} << 20;

/// Stands before each block.
struct alignas(kAlignment) Header {
  Header* next;
  size_t list;
};

struct SizeClass {
  size_t list;
  size_t bytes;
};

/// Sizes are (4, 5, 6 or 7) * 2^k: at most a quarter of a block is unused.
constexpr SizeClass size_class(size_t bytes) {
  const size_t last = std::max(bytes, kSmallest) - 1;
  const int shift = std::bit_width(last) - 3;
  const size_t leading = last >> shift;
  return {static_cast<size_t>(shift) * 4 + leading - 4, (leading + 1) << shift};
}

constexpr size_t kLists = size_class(kLargest).list + 1;

class BlockAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes == 0 ? nullptr : take(bytes);
    return {data, data, &give_back, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  static BlockAllocator& instance() {
    // Never destroyed: tensors of static variables are freed after it would be.
    static auto* allocator = new BlockAllocator();
    return *allocator;
  }

 private:
  void* take(size_t bytes) {
    if (bytes > kLargest) return fresh(bytes, kLists);
    const SizeClass size = size_class(bytes);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (Header* block = lists_[size.list]; block != nullptr) {
        lists_[size.list] = block->next;
        return block + 1;
      }
    }
    return fresh(size.bytes, size.list);
  }

  static void* fresh(size_t bytes, size_t list) {
    auto* block = static_cast<Header*>(c10::alloc_cpu(sizeof(Header) + bytes));
    block->list = list;
    return block + 1;
  }

  static void give_back(void* data) {
    if (data == nullptr) return;
    Header* block = static_cast<Header*>(data) - 1;
    if (block->list == kLists) return c10::free_cpu(block);
    BlockAllocator& allocator = instance();
    const std::lock_guard<std::mutex> lock(allocator.mutex_);
    block->next = std::exchange(allocator.lists_[block->list], block);
  }

  std::mutex mutex_;
  /// The block freed last, which is most likely in the cache, comes first.
  std::array<Header*, kLists> lists_{};
};

}  // namespace

void reuse_tensor_memory() { c10::SetCPUAllocator(&BlockAllocator::instance()); }

}  // namespace ppfsdp::comm
