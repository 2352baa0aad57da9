#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "src/comm/runtime.h"

namespace ppfsdp::fsdp::testing {

/// One rank of a world whose other ranks are copies of it: collectives run at once and return what
/// equal ranks would. It keeps a log, and a vector clock for each stream, as if streams ran at the
/// same time: what one stream may rely on of another is only what an event has told it. That finds
/// a missing wait of a side stream on the compute stream, which a mesh whose compute stream is the
/// host cannot show.
class LoopbackRuntime : public comm::Runtime {
 public:
  LoopbackRuntime(int rank, int world_size);

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  c10::Device device() const override { return c10::Device(c10::kCPU); }
  std::string backend() const override { return "loopback"; }
  comm::ReductionOrder reduction_order() const override { return comm::ReductionOrder::kRankOrder; }
  const comm::CommunicatorPtr& world() override { return world_; }
  comm::Stream& compute_stream() override { return *compute_; }
  std::shared_ptr<comm::Stream> create_stream(const std::string& name,
                                              comm::StreamPriority priority) override;

  /// The compute stream writes what later all-gathers read.
  void write_shards();
  /// Whether the compute stream may read the last all-gather of `numel` elements a rank.
  bool gather_is_visible(int64_t numel) const;
  /// Whether the compute stream may read every reduce-scatter.
  bool reductions_are_visible() const;
  /// Buffers of all-gathers that are alive now.
  int live_gathers() const;
  void note(const std::string& text) { log.push_back(text); }

  /// "gather N" and "reduce N" with the elements of one rank's part, and what `note` added.
  std::vector<std::string> log;
  /// What was not ordered by events, or freed too early; empty if all is well.
  std::vector<std::string> faults;

 private:
  friend class LoopbackStream;
  friend class LoopbackCommunicator;
  using Clock = std::map<int, int64_t>;
  struct Collective {
    bool is_gather;
    int64_t numel;
    int stream;
    int64_t time;
    /// When the compute stream was told that it has run.
    int64_t seen = 0;
    c10::weak_intrusive_ptr<c10::StorageImpl> buffer;
  };

  bool is_visible(const Collective& collective) const;
  void start(bool is_gather, const at::Tensor& part, const at::Tensor& buffer,
             comm::Stream& stream);
  /// A buffer may go only when the compute stream knows that the collective has run.
  void check_buffers();
  void note_visible();

  int rank_;
  int world_size_;
  std::vector<Clock> clocks_;
  int64_t shards_written_ = 0;
  std::vector<Collective> collectives_;
  std::shared_ptr<comm::Stream> compute_;
  comm::CommunicatorPtr world_;
};

}  // namespace ppfsdp::fsdp::testing
