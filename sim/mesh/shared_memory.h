#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>

namespace ppfsdp::sim {

/// Host memory that lies under several storages at once. A storage that is written to gets a copy
/// of its own first (LibTorch's copy-on-write), so that none of the others can tell.
class SharedMemory {
 public:
  /// `bytes` of memory without a value; fill it before it is put under a storage.
  explicit SharedMemory(size_t bytes);

  char* data() const { return static_cast<char*>(memory_.get()); }
  size_t size() const { return bytes_; }

  /// Makes the first `bytes` (at most size()) the memory of `storage`, whose old memory is freed.
  /// They live as long as any of their storages does.
  void put_under(c10::StorageImpl& storage, size_t bytes) const;

 private:
  size_t bytes_;
  c10::DataPtr memory_;
};

}  // namespace ppfsdp::sim
