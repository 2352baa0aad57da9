#pragma once

#include <semaphore.h>

#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <vector>

#include "sim/mesh/schedule.h"

namespace ppfsdp::sim {

/// Thrown in every rank that is ended because of another's error, at its next point.
class RankEnded : public std::exception {
 public:
  const char* what() const noexcept override {
    return "this rank is ended because another rank of the simulated world failed";
  }
};

/// Runs ranks as threads of which exactly one, the holder of the baton, runs at a time, and steps
/// tasks (streams) on the holder's thread in between. All other state of a simulated world is
/// touched by the holder only, so it needs no lock.
class Scheduler {
 public:
  /// Work that has no thread of its own.
  class Task {
   public:
    virtual ~Task() = default;
    /// Does one piece of work; called while the task is ready. Throws nothing.
    virtual void step() = 0;
  };

  /// What the owner of the scheduler is asked and told.
  class Client {
   public:
    virtual ~Client() = default;
    /// `rank`'s code is about to go on.
    virtual void before_resume(int rank) = 0;
    /// Nothing can run, though work is left: the error for it. Null when all is done.
    virtual std::exception_ptr stuck() = 0;
  };

  Scheduler(int n, std::unique_ptr<Policy> policy, Client& client);

  /// `task` must live as long as the scheduler. Returns its id; it is not ready yet.
  ActorId add_task(Task& task);
  /// Whether a task, or a rank that blocks, can go on.
  void set_ready(ActorId id, bool ready);

  /// Lets the policy decide who goes on; returns when it is this rank again.
  void point(int rank, Point point);
  /// Waits until set_ready(rank, true), which some task or rank has to call.
  void block(int rank);

  /// Ends the world with `error`, unless it is ending already. `rank`: whose error it is; -1: the
  /// world's.
  void fail(int rank, std::exception_ptr error);

  /// Whether a task runs now; it may use nothing that could hand over.
  bool in_task() const { return in_task_; }
  /// The rank whose code runs now; -1 in a task or outside `run`.
  int running() const { return running_; }
  bool has_returned(int rank) const { return ranks_[rank].returned; }
  bool ending() const { return ending_; }

  /// Runs `body(rank)` for every rank on threads with `stack_bytes` of stack and waits for all.
  void run(const std::function<void(int rank)>& body, size_t stack_bytes);

  /// The first failure: its rank (or -1) and its error, null if there was none.
  int failed_rank() const { return failed_rank_; }
  std::exception_ptr error() const { return error_; }

 private:
  /// The baton on its way to one rank. (Not std::atomic::wait, which looks several times before it
  /// sleeps: in vain, since whoever passes the baton on is still at work.)
  class Turn {
   public:
    Turn();
    ~Turn();
    void pass();
    void await();

   private:
    sem_t semaphore_;
  };

  struct alignas(64) Rank {
    Turn turn;
    bool returned = false;
  };

  static void* thread_main(void* start);

  void rank_main(int rank);
  /// Chooses and runs tasks until a rank is chosen, which is returned; -1 when the world ends.
  int next_rank(Point point);
  void pass_to(int rank);
  void await_turn(int rank);
  /// Called by a rank that may not go on because the world is ending.
  static void end_rank();

  int n_;
  std::unique_ptr<Policy> policy_;
  Client& client_;
  std::deque<Rank> ranks_;
  std::vector<Task*> tasks_;
  ReadySet ready_;
  ActorId current_ = -1;
  int running_ = -1;
  bool in_task_ = false;
  bool ending_ = false;
  int failed_rank_ = -1;
  std::exception_ptr error_;
  const std::function<void(int rank)>* body_ = nullptr;
};

}  // namespace ppfsdp::sim
