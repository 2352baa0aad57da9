#include "sim/mesh/sim_stream.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <utility>

#include "sim/mesh/operation.h"
#include "sim/mesh/world_state.h"

namespace ppfsdp::sim {
namespace {

SimEventPtr sim_event(const comm::EventPtr& event, const StreamQueue& stream) {
  auto sim = std::dynamic_pointer_cast<SimEvent>(event);
  TORCH_CHECK(sim != nullptr, "stream '", stream.name(), "' (rank ", stream.rank(),
              "): the event is not one of the simulated mesh");
  TORCH_CHECK(sim->stream().rank() == stream.rank(), "stream '", stream.name(), "' (rank ",
              stream.rank(), "): the event is of stream '", sim->stream().name(), "' of rank ",
              sim->stream().rank(), "; ranks wait for one another by communicating only");
  return sim;
}

}  // namespace

void SimEvent::synchronize() {
  const int rank = stream_.rank();
  world_->check_caller(rank, "Event::synchronize");
  if (!done_) {
    world_->wait_for(rank, shared_from_this());
  } else {
    world_->scheduler().point(rank, Point::kQueue);
  }
  if (error_ != nullptr) {
    world_->set_error_seen(rank, error_);
    std::rethrow_exception(error_);
  }
}

void SimEvent::fire(const std::exception_ptr& error) {
  done_ = true;
  error_ = error;
  for (const ActorId id : std::exchange(waiters_, {})) world_->wake(id);
}

StreamQueue::StreamQueue(World& world, int rank, std::string name, bool is_compute)
    : world_(world),
      rank_(rank),
      name_(std::move(name)),
      is_compute_(is_compute),
      id_(world.scheduler().add_task(*this)) {}

void StreamQueue::push(Item item) {
  queue_.push_back(std::move(item));
  if (queue_.size() == 1) advance();
}

void StreamQueue::push_closure(std::function<void()> closure) {
  push(std::make_unique<Closure>(Closure{std::move(closure), at::ThreadLocalState()}));
}

void StreamQueue::push_record(SimEventPtr event) { push(Record{std::move(event)}); }

void StreamQueue::push_wait(SimEventPtr event) { push(Wait{std::move(event)}); }

void StreamQueue::push_operation(std::shared_ptr<Operation> operation, int index) {
  push(Participation{std::move(operation), index});
}

void StreamQueue::pop_operation() {
  queue_.pop_front();
  if (is_compute_) world_.wake(rank_);
  advance();
}

void StreamQueue::advance() {
  while (!queue_.empty()) {
    Item& head = queue_.front();
    if (std::holds_alternative<std::unique_ptr<Closure>>(head)) {
      if (error_ == nullptr) return world_.scheduler().set_ready(id_, true);
      queue_.pop_front();
    } else if (auto* record = std::get_if<Record>(&head)) {
      // Popped first: firing may advance other streams, and this one must then be consistent.
      const SimEventPtr event = std::move(record->event);
      queue_.pop_front();
      event->fire(error_);
    } else if (auto* wait = std::get_if<Wait>(&head)) {
      if (!wait->event->done()) return wait->event->add_waiter(id_);
      if (error_ == nullptr) error_ = wait->event->error();
      queue_.pop_front();
    } else {
      // Peers wait for this operation, and it cannot run behind an error.
      if (error_ != nullptr) return world_.scheduler().fail(rank_, error_);
      const auto& [operation, index] = std::get<Participation>(head);
      if (operation->arrive(index)) world_.scheduler().set_ready(id_, true);
      return;
    }
  }
}

void StreamQueue::step() {
  world_.scheduler().set_ready(id_, false);
  if (auto* participation = std::get_if<Participation>(&queue_.front())) {
    const std::shared_ptr<Operation> operation = participation->operation;
    return operation->run();
  }
  auto closure = std::move(std::get<std::unique_ptr<Closure>>(queue_.front()));
  queue_.pop_front();
  run_closure(std::move(closure));
  advance();
}

void StreamQueue::run_closure(std::unique_ptr<Closure> closure) {
  world_.poison_in_flight(rank_);
  const at::ThreadLocalStateGuard guard(closure->state);
  try {
    closure->function();
    // What it captured may be freed here too.
    closure->function = nullptr;
  } catch (...) {
    error_ = std::current_exception();
  }
}

std::string StreamQueue::describe_head() const {
  const Item& head = queue_.front();
  if (const auto* participation = std::get_if<Participation>(&head)) {
    return participation->operation->where() + participation->operation->describe_missing();
  }
  const auto* wait = std::get_if<Wait>(&head);
  TORCH_INTERNAL_ASSERT(wait != nullptr, "a stream whose head can run is not stuck");
  const StreamQueue& other = wait->event->stream();
  return fmt::format("an event of stream '{}', which is at {}", other.name(),
                     other.describe_head());
}

SimStream::SimStream(std::shared_ptr<World> world, StreamQueue& queue)
    : comm::Stream(queue.name()), world_(std::move(world)), queue_(queue) {}

comm::EventPtr SimStream::record() {
  world_->check_caller(queue_.rank(), "Stream::record");
  auto event = std::make_shared<SimEvent>(world_, queue_);
  queue_.push_record(event);
  world_->scheduler().point(queue_.rank(), Point::kQueue);
  return event;
}

void SimStream::synchronize() { record()->synchronize(); }

void SideStream::run(std::function<void()> closure) {
  world_->check_caller(queue_.rank(), "Stream::run");
  queue_.push_closure(std::move(closure));
  world_->scheduler().point(queue_.rank(), Point::kQueue);
}

void SideStream::wait(const comm::EventPtr& event) {
  if (event == nullptr) return;
  world_->check_caller(queue_.rank(), "Stream::wait");
  queue_.push_wait(sim_event(event, queue_));
  world_->scheduler().point(queue_.rank(), Point::kQueue);
}

void ComputeStream::run(std::function<void()> closure) {
  world_->check_caller(queue_.rank(), "Stream::run");
  closure();
}

void ComputeStream::wait(const comm::EventPtr& event) {
  if (event != nullptr) sim_event(event, queue_)->synchronize();
}

}  // namespace ppfsdp::sim
