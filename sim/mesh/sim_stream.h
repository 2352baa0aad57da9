#pragma once

#include <ATen/ThreadLocalState.h>

#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "sim/mesh/scheduler.h"
#include "src/comm/runtime.h"
#include "src/comm/stream.h"

namespace ppfsdp::sim {

class Operation;
class StreamQueue;
class World;

/// An event of one rank's stream.
class SimEvent : public comm::Event, public std::enable_shared_from_this<SimEvent> {
 public:
  SimEvent(std::shared_ptr<World> world, StreamQueue& stream)
      : world_(std::move(world)), stream_(stream) {}

  void synchronize() override;

  /// Whether all work before it has run (or was dropped because of an error before it).
  bool done() const { return done_; }
  /// The error of that work.
  const std::exception_ptr& error() const { return error_; }
  StreamQueue& stream() const { return stream_; }
  /// Wakes `id`, a rank or a stream, once the event is done.
  void add_waiter(ActorId id) { waiters_.push_back(id); }
  /// All before it has run, or `error` stopped it.
  void fire(const std::exception_ptr& error);

 private:
  std::shared_ptr<World> world_;
  StreamQueue& stream_;
  bool done_ = false;
  std::exception_ptr error_;
  std::vector<ActorId> waiters_;
};

using SimEventPtr = std::shared_ptr<SimEvent>;

/// The queue of work of one rank's stream; the scheduler steps it when its head can run.
class StreamQueue : public Scheduler::Task {
 public:
  StreamQueue(World& world, int rank, std::string name, bool is_compute);

  int rank() const { return rank_; }
  const std::string& name() const { return name_; }
  /// The compute stream runs with its rank: its queue holds the operation that the rank waits in.
  bool is_compute() const { return is_compute_; }
  bool empty() const { return queue_.empty(); }
  /// The error of a closure; what comes behind it on this stream does not run.
  const std::exception_ptr& error() const { return error_; }

  void push_closure(std::function<void()> closure);
  void push_record(SimEventPtr event);
  void push_wait(SimEventPtr event);
  /// `index`: which participant of the operation this stream is.
  void push_operation(std::shared_ptr<Operation> operation, int index);

  /// Takes the finished operation from the head.
  void pop_operation();
  /// Handles what is at the head until there is something that must be stepped, or nothing.
  void advance();
  void step() override;
  void clear() { queue_.clear(); }

  /// What the head of the queue is or waits for, for a report of a deadlock.
  std::string describe_head() const;

 private:
  struct Closure {
    std::function<void()> function;
    at::ThreadLocalState state;
  };
  struct Record {
    SimEventPtr event;
  };
  struct Wait {
    SimEventPtr event;
  };
  struct Participation {
    std::shared_ptr<Operation> operation;
    int index;
  };
  using Item = std::variant<std::unique_ptr<Closure>, Record, Wait, Participation>;

  void push(Item item);
  void run_closure(std::unique_ptr<Closure> closure);

  World& world_;
  int rank_;
  std::string name_;
  bool is_compute_;
  ActorId id_;
  std::deque<Item> queue_;
  std::exception_ptr error_;
};

/// The face of a queue.
class SimStream : public comm::Stream {
 public:
  SimStream(std::shared_ptr<World> world, StreamQueue& queue);

  const World& world() const { return *world_; }
  StreamQueue& queue() const { return queue_; }
  comm::EventPtr record() override;
  void synchronize() override;

 protected:
  std::shared_ptr<World> world_;
  StreamQueue& queue_;
};

/// A stream whose work waits in its queue until the scheduler picks it.
class SideStream : public SimStream {
 public:
  using SimStream::SimStream;
  void run(std::function<void()> closure) override;
  void wait(const comm::EventPtr& event) override;
};

/// The rank's own thread: work runs at once, and a wait blocks the rank.
class ComputeStream : public SimStream {
 public:
  using SimStream::SimStream;
  void run(std::function<void()> closure) override;
  void wait(const comm::EventPtr& event) override;
};

}  // namespace ppfsdp::sim
