#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace ppfsdp::fsdp::testing {

/// What would go wrong with memory if streams really ran at the same time, found on meta tensors.
///
/// It keeps a vector clock for each stream: what one stream may rely on of another is only what an
/// event has told it. Every LibTorch op on this thread, forward and backward, counts as an access
/// of its arguments and results by the current stream, and every allocation of a meta tensor as one
/// from that stream's pool, as CUDA's caching allocator has it: a block goes back to its stream's
/// pool the moment that its last reference goes, and the next tensor of that stream may lie in it.
/// So an access is a fault when the stream that makes it has not waited for
///  - what wrote the tensor, or, if it writes, for what reads it;
///  - the stream that allocated it, if that is another: whose earlier work may use the same memory;
///  - a stream that still used another tensor of the owner's when the last reference to it went.
///
/// One at a time.
class StreamMemory {
 public:
  using Clock = std::map<int, int64_t>;

  /// The compute stream is there from the start, as stream 0.
  static constexpr int kCompute = 0;

  StreamMemory();
  ~StreamMemory();
  StreamMemory(const StreamMemory&) = delete;
  StreamMemory& operator=(const StreamMemory&) = delete;

  int add_stream(const std::string& name);

  /// The present end of the stream's queue.
  Clock record(int stream);
  /// What the stream does from now on comes after that.
  void wait(int stream, const Clock& event);
  /// What the stream knows of itself and the others.
  const Clock& knows(int stream) const;

  /// While one is alive, ops and allocations are the stream's.
  class On {
   public:
    On(StreamMemory& memory, int stream);
    ~On();
    On(const On&) = delete;
    On& operator=(const On&) = delete;

   private:
    StreamMemory& memory_;
    int before_;
  };

  /// An access by the current stream that is no LibTorch op.
  void access(const at::Tensor& tensor, bool writes);

  /// Each once; empty if all is well.
  const std::vector<std::string>& faults() const;

  struct State;

 private:
  struct Observe;

  std::shared_ptr<State> state_;
  std::unique_ptr<Observe> observe_;
};

}  // namespace ppfsdp::fsdp::testing
