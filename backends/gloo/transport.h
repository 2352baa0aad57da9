#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <memory>

#include "backends/gloo/gloo.h"

namespace ppfsdp::gloo {

/// A send or a receive under way; it keeps its tensor alive.
using Transfer = c10::intrusive_ptr<c10::intrusive_ptr_target>;

/// LibTorch's ProcessGroupGloo over all ranks of the world, of which this uses the connections:
/// tagged messages between pairs of ranks, moved by Gloo's device thread straight from and into the
/// tensors. Gloo's own collectives would cost two more changes of thread each (an all-gather of
/// 64 KB between two ranks: 116 us beside 65), its reduce-scatter reduces the whole input on every
/// rank, and a size mismatch in one aborts the process. A message whose tag the peer does not ask
/// for is never sent, so a tag that carries the size makes a mismatch harmless.
class Transport {
 public:
  /// Meets the other ranks; blocks until all are connected. CommError.
  explicit Transport(const GlooOptions& options);
  ~Transport();

  /// Contiguous CPU tensors; `peer` is a rank of the world, `tag` has 31 bits. Messages between two
  /// ranks match by tag, those of one tag in order. Throws what Gloo throws.
  Transfer send(const at::Tensor& tensor, int peer, uint32_t tag);
  Transfer recv(const at::Tensor& tensor, int peer, uint32_t tag);

  /// Blocks until a transfer is done; throws what Gloo throws, a timeout included (which closes all
  /// connections of this rank). False when it was aborted. Any thread.
  static bool wait(const Transfer& transfer, std::chrono::milliseconds timeout);
  /// Makes a thread that is in wait() return false.
  static void abort(const Transfer& transfer);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ppfsdp::gloo
