#include "sim/mesh/scheduler.h"

#include <c10/util/Exception.h>
#include <limits.h>
#include <pthread.h>

#include <algorithm>
#include <string>
#include <system_error>
#include <utility>

namespace ppfsdp::sim {
namespace {

struct ThreadStart {
  Scheduler* scheduler;
  int rank;
};

}  // namespace

Scheduler::Scheduler(int n, std::unique_ptr<Policy> policy, Client& client)
    : n_(n), policy_(std::move(policy)), client_(client), ranks_(n) {
  for (int rank = 0; rank < n; ++rank) ready_.insert(rank);
}

ActorId Scheduler::add_task(Task& task) {
  tasks_.push_back(&task);
  return n_ + static_cast<ActorId>(tasks_.size()) - 1;
}

void Scheduler::set_ready(ActorId id, bool ready) {
  if (ready) {
    ready_.insert(id);
  } else {
    ready_.erase(id);
  }
}

void Scheduler::end_rank() {
  // A destructor that communicates while the rank unwinds must not throw.
  if (std::uncaught_exceptions() == 0) throw RankEnded();
}

void Scheduler::point(int rank, Point point) {
  if (in_task_) return;
  if (ending_) return end_rank();
  current_ = rank;
  const int next = next_rank(point);
  if (next == rank) {
    running_ = rank;
    client_.before_resume(rank);
    return;
  }
  if (next >= 0) {
    pass_to(next);
    await_turn(rank);
  }
  if (ending_) {
    running_ = rank;
    return end_rank();
  }
  client_.before_resume(rank);
}

void Scheduler::block(int rank) {
  ready_.erase(rank);
  point(rank, Point::kBlocked);
}

int Scheduler::next_rank(Point point) {
  running_ = -1;
  while (!ending_) {
    if (ready_.empty()) {
      if (std::exception_ptr error = client_.stuck()) fail(-1, std::move(error));
      return -1;
    }
    current_ = ready_.count() == 1 ? ready_.nth(0) : policy_->choose(ready_, current_, point);
    if (current_ < n_) return current_;
    in_task_ = true;
    tasks_[current_ - n_]->step();
    in_task_ = false;
    point = Point::kBlocked;
  }
  return -1;
}

void Scheduler::fail(int rank, std::exception_ptr error) {
  if (ending_) return;
  ending_ = true;
  failed_rank_ = rank;
  error_ = std::move(error);
}

Scheduler::Turn::Turn() {
  TORCH_CHECK(sem_init(&semaphore_, 0, 0) == 0, "cannot make a semaphore");
}

Scheduler::Turn::~Turn() { sem_destroy(&semaphore_); }

void Scheduler::Turn::pass() { sem_post(&semaphore_); }

void Scheduler::Turn::await() {
  // A signal's handler interrupts it.
  while (sem_wait(&semaphore_) != 0) {
  }
}

void Scheduler::pass_to(int rank) { ranks_[rank].turn.pass(); }

void Scheduler::await_turn(int rank) {
  ranks_[rank].turn.await();
  running_ = rank;
}

void Scheduler::rank_main(int rank) {
  await_turn(rank);
  if (!ending_) {
    try {
      (*body_)(rank);
    } catch (...) {
      fail(rank, std::current_exception());
    }
  }
  ranks_[rank].returned = true;
  ready_.erase(rank);
  int next = next_rank(Point::kBlocked);
  if (next < 0) {
    // The world is ending, or all is done: the ranks still there unwind one after the other.
    const auto left =
        std::find_if(ranks_.begin(), ranks_.end(), [](const Rank& r) { return !r.returned; });
    if (left == ranks_.end()) return;
    next = static_cast<int>(left - ranks_.begin());
  }
  pass_to(next);
}

void* Scheduler::thread_main(void* argument) {
  const std::unique_ptr<ThreadStart> start(static_cast<ThreadStart*>(argument));
  const std::string name = "rank " + std::to_string(start->rank);
  pthread_setname_np(pthread_self(), name.c_str());
  start->scheduler->rank_main(start->rank);
  return nullptr;
}

void Scheduler::run(const std::function<void(int rank)>& body, size_t stack_bytes) {
  body_ = &body;
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  const size_t bytes = std::max(stack_bytes, static_cast<size_t>(PTHREAD_STACK_MIN));
  int status = pthread_attr_setstacksize(&attributes, bytes);
  std::vector<pthread_t> threads;
  threads.reserve(n_);
  for (int rank = 0; rank < n_ && status == 0; ++rank) {
    auto start = std::make_unique<ThreadStart>(ThreadStart{this, rank});
    pthread_t thread;
    status = pthread_create(&thread, &attributes, &thread_main, start.get());
    if (status != 0) break;
    start.release();
    threads.push_back(thread);
  }
  pthread_attr_destroy(&attributes);
  const int started = static_cast<int>(threads.size());
  if (status != 0) {
    for (int rank = started; rank < n_; ++rank) ranks_[rank].returned = true;
    fail(-1, std::make_exception_ptr(
                 std::system_error(status, std::generic_category(),
                                   "cannot start the thread of rank " + std::to_string(started) +
                                       " with " + std::to_string(bytes) + " bytes of stack")));
  }
  if (started > 0) pass_to(ending_ ? 0 : next_rank(Point::kBlocked));
  for (const pthread_t thread : threads) pthread_join(thread, nullptr);
  running_ = -1;
}

}  // namespace ppfsdp::sim
