#include "backends/nccl/reporter.h"

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace ppfsdp::nccl {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr milliseconds kPeriod{5};
/// For what must come; not how long it takes.
constexpr seconds kPatience{20};

using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// A rank that has a reporter.
class Member {
 public:
  Member(const StorePtr& store, int number, int world_size, milliseconds silence = seconds(3600),
         milliseconds period = kPeriod) {
    Reporter::Rank rank;
    rank.number = number;
    rank.world_size = world_size;
    rank.progress = [this] {
      const std::lock_guard lock(mutex_);
      return progress_;
    };
    rank.waits = [this] { return waits.load(); };
    rank.fail = [this](const std::string& why) {
      const std::lock_guard lock(mutex_);
      if (why_.empty()) why_ = why;
      failed_.notify_all();
    };
    reporter = std::make_unique<Reporter>(store, std::move(rank), period, silence);
  }
  ~Member() { reporter.reset(); }

  void set_progress(const Progress& progress) {
    const std::lock_guard lock(mutex_);
    progress_["world"] = progress;
  }
  /// What it failed with.
  std::string wait_for_failure() {
    std::unique_lock lock(mutex_);
    failed_.wait_for(lock, kPatience, [&] { return !why_.empty(); });
    return why_;
  }
  bool failed() {
    const std::lock_guard lock(mutex_);
    return !why_.empty();
  }

  std::atomic<bool> waits{true};
  std::unique_ptr<Reporter> reporter;

 private:
  std::mutex mutex_;
  std::condition_variable failed_;
  std::map<std::string, Progress> progress_;
  std::string why_;
};

/// What `of` has reported, as `from` finds it, once it says `issued`.
std::optional<Progress> wait_for_report(Member& from, int of, uint64_t issued) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (std::chrono::steady_clock::now() < deadline) {
    const Reporter::Found found = from.reporter->collect({of}, kPatience);
    const auto report = found.reports.find(of);
    if (report != found.reports.end()) {
      const auto progress = report->second.groups.find("world");
      if (progress != report->second.groups.end() && progress->second.issued == issued) {
        return progress->second;
      }
    }
    std::this_thread::sleep_for(kPeriod);
  }
  return std::nullopt;
}

TEST(Reporter, RanksSeeEachOthersProgress) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  Member first(store, 0, 2), second(store, 1, 2);
  const Progress progress{3, 1, "all_reduce of 10 Float by sum"};
  second.set_progress(progress);
  EXPECT_EQ(wait_for_report(first, 1, 3), progress);
  const Progress later{4, 4, "broadcast of 1 Long from rank 0"};
  second.set_progress(later);
  EXPECT_EQ(wait_for_report(first, 1, 4), later);
  EXPECT_FALSE(first.failed());
}

// The others would hang until their own timeout, and then not know why.
TEST(Reporter, AFailureReachesEveryOtherRankAndOnlyTheFirstOne) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  Member first(store, 0, 3), second(store, 1, 3), third(store, 2, 3);
  second.reporter->publish_failure("the cause", kPatience);
  first.reporter->publish_failure("a consequence", kPatience);
  EXPECT_EQ(first.wait_for_failure(), "rank 1 failed: the cause");
  EXPECT_EQ(third.wait_for_failure(), "rank 1 failed: the cause");
  EXPECT_EQ(third.reporter->collect({0}, kPatience).failure, "rank 1 failed: the cause");
  const Reporter::Found own = second.reporter->collect({0}, kPatience);
  EXPECT_TRUE(own.answered);
  EXPECT_FALSE(own.failure.has_value()) << "its own failure is no news to it";
}

TEST(Reporter, ANeighbourThatFallsSilentIsTakenForDeadByARankThatWaits) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  Member first(store, 0, 2, milliseconds(60));
  {
    Member second(store, 1, 2);
    second.set_progress({1, 0, "barrier"});
    EXPECT_TRUE(wait_for_report(first, 1, 1));
  }
  EXPECT_EQ(first.wait_for_failure(),
            "rank 1 gave no sign of life for 0.06 s: its process ended or hangs");
}

TEST(Reporter, ARankThatHasLeftIsNotTakenForDead) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  Member first(store, 0, 2, milliseconds(20));
  {
    Member second(store, 1, 2);
    second.reporter->leave(kPatience);
  }
  // Its periods go by: as many as a death would take, and more.
  std::this_thread::sleep_for(milliseconds(100));
  EXPECT_FALSE(first.failed());
}

TEST(Reporter, ARankThatWaitsForNothingLeavesTheDeadAlone) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  Member first(store, 0, 2, milliseconds(20));
  first.waits = false;
  std::this_thread::sleep_for(milliseconds(100));
  EXPECT_FALSE(first.failed());
  first.waits = true;
  EXPECT_NE(first.wait_for_failure(), "");
}

// Rank 0's process has the store: gone too early, it takes the others' last words with it.
TEST(Reporter, RankZeroStaysUntilTheOthersHaveLeft) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  Member first(store, 0, 2), second(store, 1, 2);
  std::atomic<bool> second_left{false};
  std::thread later([&] {
    std::this_thread::sleep_for(milliseconds(50));
    second_left = true;
    second.reporter->leave(kPatience);
  });
  first.reporter->leave(kPatience);
  EXPECT_TRUE(second_left);
  later.join();
}

// The others would say that the store is gone, not why.
TEST(Reporter, AFailedRankZeroStaysUntilTheOthersKnow) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  Member first(store, 0, 4), left(store, 1, 4), failed(store, 2, 4);
  // Looks for failures long after this one.
  Member slow(store, 3, 4, seconds(3600), milliseconds(150));
  left.reporter->leave(kPatience);
  first.reporter->publish_failure("the cause", kPatience);
  failed.reporter->publish_failure("a failure of its own", kPatience);
  first.reporter->linger(kPatience);
  EXPECT_TRUE(slow.failed());
  // For a rank that is gone it waits no longer than it is told to.
  Member last(c10::make_intrusive<c10d::HashStore>(), 0, 2);
  last.reporter->publish_failure("the cause", kPatience);
  last.reporter->linger(milliseconds(20));
  // Only rank 0 has the store.
  slow.reporter->linger(kPatience);
}

/// A store whose machine has gone: some calls fail, or never return.
class LostStore final : public c10d::HashStore {
 public:
  bool check(const std::vector<std::string>& keys) override {
    if (lost) throw std::runtime_error("Connection reset by peer\n a trace");
    std::unique_lock lock(mutex);
    back.wait(lock, [&] { return !hangs; });
    return c10d::HashStore::check(keys);
  }

  std::atomic<bool> lost{false};
  std::mutex mutex;
  std::condition_variable back;
  bool hangs = false;
};

TEST(Reporter, TheEndOfTheStoreIsAFailure) {
  const auto store = c10::make_intrusive<LostStore>();
  Member first(store, 1, 2);
  store->lost = true;
  EXPECT_EQ(first.wait_for_failure(),
            "the store on rank 0 is gone: rank 0 ended or cannot be reached (Connection reset by "
            "peer)");
  EXPECT_FALSE(first.reporter->collect({0}, milliseconds(50)).answered);
}

// A machine that is switched off says nothing at all: nobody may wait for it for ever.
TEST(Reporter, AStoreThatHangsHoldsNobodyUp) {
  const auto store = c10::make_intrusive<LostStore>();
  {
    const std::lock_guard lock(store->mutex);
    store->hangs = true;
  }
  auto first = std::make_unique<Member>(store, 1, 2);
  EXPECT_FALSE(first->reporter->collect({0}, milliseconds(20)).answered);
  first->reporter->publish_failure("x", milliseconds(20));
  std::thread returns([&] {
    // The destructor gives up only after a while; here the store comes back before.
    std::this_thread::sleep_for(milliseconds(50));
    const std::lock_guard lock(store->mutex);
    store->hangs = false;
    store->back.notify_all();
  });
  first.reset();
  returns.join();
}

}  // namespace
}  // namespace ppfsdp::nccl
