#include "src/fsdp/testing/loopback_runtime.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

namespace ppfsdp::fsdp::testing {

namespace {

constexpr int kCompute = 0;

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
    explicit LoopbackEvent(LoopbackRuntime::Clock clock) : clock(std::move(clock)) {}
    void synchronize() override {}
    LoopbackRuntime::Clock clock;
  };

  int id() const { return id_; }
  void run(std::function<void()> closure) override {
    ++clock()[id_];
    closure();
  }
  comm::EventPtr record() override {
    ++clock()[id_];
    runtime_.check_buffers();
    return std::make_shared<LoopbackEvent>(clock());
  }
  void wait(const comm::EventPtr& event) override {
    if (event == nullptr) return;
    for (const auto& [stream, time] : static_cast<LoopbackEvent&>(*event).clock) {
      clock()[stream] = std::max(clock()[stream], time);
    }
    if (id_ == kCompute) runtime_.note_visible();
  }
  void synchronize() override {}

 private:
  LoopbackRuntime::Clock& clock() { return runtime_.clocks_[id_]; }

  LoopbackRuntime& runtime_;
  int id_;
};

class LoopbackCommunicator : public comm::Communicator {
 public:
  LoopbackCommunicator(const std::string& name, LoopbackRuntime& runtime, std::vector<int> ranks,
                       int rank)
      : Communicator(name, std::move(ranks), rank), runtime_(runtime) {}

 protected:
  void do_all_gather_into(const at::Tensor& output, const at::Tensor& input,
                          comm::Stream& stream) override {
    runtime_.start(true, input, output, stream);
    const at::Tensor part = input.clone();
    for (int rank = 0; rank < size(); ++rank) {
      output.narrow(0, rank * part.numel(), part.numel()).copy_(part);
    }
  }
  void do_reduce_scatter(const at::Tensor& output, const at::Tensor& input, const comm::ReduceOp&,
                         comm::Stream& stream) override {
    runtime_.start(false, output, input, stream);
    output.copy_(input.narrow(0, rank() * output.numel(), output.numel()));
  }
  void do_all_reduce(const at::Tensor&, const comm::ReduceOp&, comm::Stream&) override { refuse(); }
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
  static void refuse() { TORCH_CHECK(false, "LoopbackRuntime: fully_shard needs no such call"); }

  LoopbackRuntime& runtime_;
};

LoopbackRuntime::LoopbackRuntime(int rank, int world_size)
    : rank_(rank),
      world_size_(world_size),
      clocks_(1),
      compute_(std::make_shared<LoopbackStream>("compute", *this, kCompute)),
      world_(std::make_shared<LoopbackCommunicator>("world", *this, all_ranks(world_size), rank)) {}

std::shared_ptr<comm::Stream> LoopbackRuntime::create_stream(const std::string& name,
                                                             comm::StreamPriority) {
  clocks_.emplace_back();
  return std::make_shared<LoopbackStream>(name, *this, static_cast<int>(clocks_.size()) - 1);
}

void LoopbackRuntime::write_shards() { shards_written_ = ++clocks_[kCompute][kCompute]; }

bool LoopbackRuntime::is_visible(const Collective& collective) const {
  const Clock& compute = clocks_[kCompute];
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

void LoopbackRuntime::note_visible() {
  for (Collective& collective : collectives_) {
    if (collective.seen == 0 && is_visible(collective)) {
      collective.seen = ++clocks_[kCompute][kCompute];
    }
  }
}

void LoopbackRuntime::check_buffers() {
  for (const Collective& collective : collectives_) {
    if (collective.buffer.expired() && !is_visible(collective)) {
      faults.push_back("the buffer of a collective of " + std::to_string(collective.numel) +
                       " elements was freed while it was in flight");
    }
  }
}

void LoopbackRuntime::start(bool is_gather, const at::Tensor& part, const at::Tensor& buffer,
                            comm::Stream& stream) {
  check_buffers();
  const int id = dynamic_cast<LoopbackStream&>(stream).id();
  Clock& clock = clocks_[id];
  const std::string name =
      std::string(is_gather ? "gather " : "reduce ") + std::to_string(part.numel());
  // A reduction reads what the compute stream has just written, a gather the shards.
  const int64_t needed = is_gather ? shards_written_ : clocks_[kCompute][kCompute];
  if (clock[kCompute] < needed) {
    faults.push_back(name + " does not wait for what it reads");
  }
  for (const Collective& earlier : collectives_) {
    if (is_gather && earlier.is_gather && earlier.buffer.expired() &&
        clock[kCompute] < earlier.seen) {
      faults.push_back(name + " may write to memory from which an earlier one is still copied");
    }
  }
  log.push_back(name);
  collectives_.push_back(
      {is_gather, part.numel(), id, ++clock[id], 0,
       c10::weak_intrusive_ptr<c10::StorageImpl>(buffer.storage().getWeakStorageImpl())});
}

}  // namespace ppfsdp::fsdp::testing
