#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "src/comm/runtime.h"
#include "src/fsdp/testing/stream_memory.h"

namespace ppfsdp::fsdp::testing {

/// One rank of a world whose other ranks are copies of it: collectives run at once and return what
/// equal ranks would. It keeps a log, and on the meta device watches memory and streams as if
/// streams ran at the same time (StreamMemory). That finds what a mesh whose compute stream is the
/// host cannot show.
class LoopbackRuntime : public comm::Runtime {
 public:
  /// `device`: meta, or the CPU for values.
  LoopbackRuntime(int rank, int world_size, c10::Device device = c10::kMeta);

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  c10::Device device() const override { return device_; }
  std::string backend() const override { return "loopback"; }
  comm::ReductionOrder reduction_order() const override { return comm::ReductionOrder::kRankOrder; }
  const comm::CommunicatorPtr& world() override { return world_; }
  comm::Stream& compute_stream() override { return *compute_; }
  std::shared_ptr<comm::Stream> create_stream(const std::string& name,
                                              comm::StreamPriority priority) override;

  /// Whether the compute stream may read the last all-gather of `numel` elements a rank.
  bool gather_is_visible(int64_t numel) const;
  /// Whether the compute stream may read every reduce-scatter.
  bool reductions_are_visible() const;
  /// Buffers of all-gathers that are alive now.
  int live_gathers() const;
  void note(const std::string& text) { log.push_back(text); }
  /// What was not ordered by events, or freed too early; empty if all is well.
  const std::vector<std::string>& faults() const { return memory_.faults(); }

  /// "gather N" and "reduce N" with the elements of one rank's part, and what `note` added.
  std::vector<std::string> log;
  /// "N of STREAM": elements that a communicator was asked for, of a group of several ranks.
  std::vector<std::string> allocations;
  /// How often this rank's host waited for a stream.
  int host_waits = 0;

 private:
  friend class LoopbackStream;
  friend class LoopbackCommunicator;
  struct Collective {
    bool is_gather;
    int64_t numel;
    int stream;
    int64_t time;
    c10::weak_intrusive_ptr<c10::StorageImpl> buffer;
  };

  bool is_visible(const Collective& collective) const;
  void note_collective(bool is_gather, const at::Tensor& part, const at::Tensor& buffer,
                       int stream);

  int rank_;
  int world_size_;
  c10::Device device_;
  StreamMemory memory_;
  std::vector<Collective> collectives_;
  std::shared_ptr<comm::Stream> compute_;
  comm::CommunicatorPtr world_;
};

}  // namespace ppfsdp::fsdp::testing
