#include "src/fsdp/testing/loopback_runtime.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

namespace ppfsdp::fsdp::testing {

namespace {

std::vector<int> all_ranks(int n) {
  std::vector<int> ranks(n);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

class LoopbackStream : public comm::Stream {
 public:
  LoopbackStream(const std::string& name, LoopbackRuntime& runtime, int id)
      : comm::Stream(name), runtime_(runtime), id_(id) {}

  struct LoopbackEvent : comm::Event {
    LoopbackEvent(LoopbackRuntime& runtime, StreamMemory::Clock clock)
        : runtime(runtime), clock(std::move(clock)) {}
    void synchronize() override { ++runtime.host_waits; }
    LoopbackRuntime& runtime;
    StreamMemory::Clock clock;
  };

  int id() const { return id_; }
  // As on CUDA the closure is called, and gone, at once.
  void run(std::function<void()> closure) override {
    const StreamMemory::On on(runtime_.memory_, id_);
    closure();
  }
  at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) override {
    const StreamMemory::On on(runtime_.memory_, id_);
    return comm::Stream::empty(sizes, options);
  }
  comm::EventPtr record() override {
    return std::make_shared<LoopbackEvent>(runtime_, runtime_.memory_.record(id_));
  }
  void wait(const comm::EventPtr& event) override {
    if (event == nullptr) return;
    runtime_.memory_.wait(id_, static_cast<LoopbackEvent&>(*event).clock);
  }
  void synchronize() override { ++runtime_.host_waits; }

 private:
  LoopbackRuntime& runtime_;
  int id_;
};

class LoopbackCommunicator : public comm::Communicator {
 public:
  LoopbackCommunicator(const std::string& name, LoopbackRuntime& runtime, std::vector<int> ranks,
                       int rank)
      : Communicator(name, std::move(ranks), rank, runtime.device()), runtime_(runtime) {}

 protected:
  void do_all_gather_into(const at::Tensor& output, const at::Tensor& input,
                          comm::Stream& stream) override {
    const int id = id_of(stream);
    const StreamMemory::On on(runtime_.memory_, id);
    runtime_.memory_.access(input, /*writes=*/false);
    runtime_.memory_.access(output, /*writes=*/true);
    const at::Tensor part = input.flatten().clone();
    for (int rank = 0; rank < size(); ++rank) {
      output.view({-1}).narrow(0, rank * part.numel(), part.numel()).copy_(part);
    }
    runtime_.note_collective(true, input, output, id);
  }
  void do_reduce_scatter(const at::Tensor& output, const at::Tensor& input, const comm::ReduceOp&,
                         comm::Stream& stream) override {
    const int id = id_of(stream);
    const StreamMemory::On on(runtime_.memory_, id);
    // A backend may overwrite the input.
    runtime_.memory_.access(input, /*writes=*/true);
    runtime_.memory_.access(output, /*writes=*/true);
    output.view({-1}).copy_(input.view({-1}).narrow(0, rank() * output.numel(), output.numel()));
    runtime_.note_collective(false, output, output, id);
  }
  void do_all_reduce(const at::Tensor& tensor, const comm::ReduceOp&,
                     comm::Stream& stream) override {
    const StreamMemory::On on(runtime_.memory_, id_of(stream));
    runtime_.memory_.access(tensor, /*writes=*/true);
  }
  at::Tensor do_allocate(int64_t numel, at::ScalarType dtype, comm::Stream& stream) override {
    if (size() > 1) {
      runtime_.allocations.push_back(std::to_string(numel) + " of " + stream.name());
    }
    return Communicator::do_allocate(numel, dtype, stream);
  }
  void do_broadcast(const at::Tensor&, int, comm::Stream&) override { refuse(); }
  void do_all_to_all(const at::Tensor&, const at::Tensor&, const std::vector<int64_t>&,
                     const std::vector<int64_t>&, comm::Stream&) override {
    refuse();
  }
  void do_send(const at::Tensor&, int, comm::Stream&) override { refuse(); }
  void do_recv(const at::Tensor&, int, comm::Stream&) override { refuse(); }
  void do_barrier() override {}
  comm::CommunicatorPtr do_subgroup(const std::vector<int>& members,
                                    const std::string& name) override {
    const auto mine = std::find(members.begin(), members.end(), rank());
    return std::make_shared<LoopbackCommunicator>(name, runtime_, members,
                                                  static_cast<int>(mine - members.begin()));
  }

 private:
  static int id_of(comm::Stream& stream) { return dynamic_cast<LoopbackStream&>(stream).id(); }
  static void refuse() { TORCH_CHECK(false, "LoopbackRuntime: fully_shard needs no such call"); }

  LoopbackRuntime& runtime_;
};

LoopbackRuntime::LoopbackRuntime(int rank, int world_size, c10::Device device)
    : rank_(rank),
      world_size_(world_size),
      device_(device),
      compute_(std::make_shared<LoopbackStream>("compute", *this, StreamMemory::kCompute)),
      world_(std::make_shared<LoopbackCommunicator>("world", *this, all_ranks(world_size), rank)) {}

std::shared_ptr<comm::Stream> LoopbackRuntime::create_stream(const std::string& name,
                                                             comm::StreamPriority) {
  return std::make_shared<LoopbackStream>(name, *this, memory_.add_stream(name));
}

bool LoopbackRuntime::is_visible(const Collective& collective) const {
  const StreamMemory::Clock& compute = memory_.knows(StreamMemory::kCompute);
  const auto found = compute.find(collective.stream);
  return found != compute.end() && found->second >= collective.time;
}

bool LoopbackRuntime::gather_is_visible(int64_t numel) const {
  const auto last =
      std::find_if(collectives_.rbegin(), collectives_.rend(), [&](const Collective& collective) {
        return collective.is_gather && collective.numel == numel;
      });
  return last != collectives_.rend() && is_visible(*last);
}

bool LoopbackRuntime::reductions_are_visible() const {
  return std::all_of(collectives_.begin(), collectives_.end(), [&](const Collective& collective) {
    return collective.is_gather || is_visible(collective);
  });
}

int LoopbackRuntime::live_gathers() const {
  return static_cast<int>(
      std::count_if(collectives_.begin(), collectives_.end(), [](const Collective& collective) {
        return collective.is_gather && !collective.buffer.expired();
      }));
}

void LoopbackRuntime::note_collective(bool is_gather, const at::Tensor& part,
                                      const at::Tensor& buffer, int stream) {
  log.push_back(std::string(is_gather ? "gather " : "reduce ") + std::to_string(part.numel()));
  memory_.record(stream);
  collectives_.push_back(
      {is_gather, part.numel(), stream, memory_.knows(stream).at(stream),
       c10::weak_intrusive_ptr<c10::StorageImpl>(buffer.storage().getWeakStorageImpl())});
}

}  // namespace ppfsdp::fsdp::testing
