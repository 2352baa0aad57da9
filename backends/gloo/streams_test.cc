// The order in which streams start, await and finish operations, with operations that are done when
// the test says so.
#include "backends/gloo/streams.h"

#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace ppfsdp::gloo {
namespace {

/// What happened, in order.
using Log = std::vector<std::string>;

/// Arrives once open() is called, at once if it is open.
class Gate {
 public:
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    opened_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    opened_.wait(lock, [&] { return open_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable opened_;
  bool open_ = false;
};

struct Script {
  std::string name;
  Log* log;
  /// Awaited if given.
  std::shared_ptr<Gate> gate = nullptr;
  /// Opened at the start if given: another operation's transfers need this one's.
  std::shared_ptr<Gate> opens = nullptr;
  int rounds = 1;
  bool fails = false;
};

class Scripted final : public Operation {
 public:
  explicit Scripted(Script script) : script_(std::move(script)) {}
  void start() override {
    script_.log->push_back("start " + script_.name);
    if (script_.opens) script_.opens->open();
  }
  void await() override {
    if (script_.gate) script_.gate->pass();
    if (script_.fails) throw std::runtime_error(script_.name + " failed");
  }
  bool finish() override {
    script_.log->push_back("finish " + script_.name);
    return --script_.rounds == 0;
  }
  void abort() override {
    if (script_.gate) script_.gate->open();
  }

 private:
  Script script_;
};

class StreamsTest : public ::testing::Test {
 protected:
  std::shared_ptr<SideStream> stream(const std::string& name) {
    return std::make_shared<SideStream>(name, progress_);
  }
  OperationPtr operation(Script script) { return std::make_unique<Scripted>(std::move(script)); }
  std::function<void()> note(const std::string& text) {
    return [this, text] { log_.push_back(text); };
  }

  std::shared_ptr<Progress> progress_ = std::make_shared<Progress>();
  Log log_;
};

TEST_F(StreamsTest, WorkOnAnIdleStreamRunsAtOnce) {
  const auto s = stream("s");
  s->run(note("closure"));
  EXPECT_EQ(log_, (Log{"closure"}));
  s->enqueue(operation({"op", &log_}));
  EXPECT_EQ(log_, (Log{"closure", "start op"}));
}

TEST_F(StreamsTest, WorkBehindAnOperationRunsWhenSomebodyWaits) {
  const auto s = stream("s");
  s->enqueue(operation({"a", &log_}));
  s->run(note("closure"));
  s->enqueue(operation({"b", &log_}));
  const comm::EventPtr event = s->record();
  s->run(note("later"));
  EXPECT_EQ(log_, (Log{"start a"}));
  event->synchronize();
  // What is behind the event went on too, as nothing stood in its way.
  const Log all = {"start a", "finish a", "closure", "start b", "finish b", "later"};
  EXPECT_EQ(log_, all);
  event->synchronize();
  s->synchronize();
  EXPECT_EQ(log_, all) << "nothing may run twice";
}

TEST_F(StreamsTest, AnEventIsDoneAtItsPlaceNotAtTheEnd) {
  const auto s = stream("s");
  s->enqueue(operation({"a", &log_}));
  const comm::EventPtr event = s->record();
  // Would block for ever if the wait went beyond the event.
  const auto gate = std::make_shared<Gate>();
  s->enqueue(operation({"b", &log_, gate}));
  event->synchronize();
  EXPECT_EQ(log_, (Log{"start a", "finish a", "start b"}));
  gate->open();
}

TEST_F(StreamsTest, AWaitForAnotherStreamDoesNotBlockTheHost) {
  const auto a = stream("a");
  const auto b = stream("b");
  a->enqueue(operation({"a", &log_}));
  b->wait(a->record());
  b->run(note("closure"));
  b->enqueue(operation({"b", &log_}));
  EXPECT_EQ(log_, (Log{"start a"}));
  // Waiting for the first stream lets the second go on.
  a->synchronize();
  EXPECT_EQ(log_, (Log{"start a", "finish a", "closure", "start b"}));
  b->synchronize();
  EXPECT_EQ(log_.back(), "finish b");
}

TEST_F(StreamsTest, WaitingForTheLaterStreamDrainsTheEarlier) {
  const auto a = stream("a");
  const auto b = stream("b");
  const auto c = stream("c");
  a->enqueue(operation({"a", &log_}));
  b->wait(a->record());
  b->enqueue(operation({"b", &log_}));
  c->wait(b->record());
  c->run(note("c"));
  c->synchronize();
  EXPECT_EQ(log_, (Log{"start a", "finish a", "start b", "finish b", "c"}));
}

TEST_F(StreamsTest, AnOperationOfTwoRoundsIsAwaitedTwice) {
  const auto s = stream("s");
  s->enqueue(operation({.name = "op", .log = &log_, .rounds = 2}));
  s->run(note("closure"));
  s->synchronize();
  EXPECT_EQ(log_, (Log{"start op", "finish op", "finish op", "closure"}));
}

TEST_F(StreamsTest, AWaitForOneStreamMovesOthersThatAPeerNeeds) {
  // The transfers of `target` end only once `second`, queued behind `first` on another stream, has
  // started; so it is when the peer waits for the other stream first.
  const auto needed = std::make_shared<Gate>();
  const auto later = std::make_shared<Gate>();
  const auto a = stream("a");
  const auto b = stream("b");
  a->enqueue(operation({"first", &log_}));
  a->run(note("closure"));
  a->enqueue(operation({.name = "second", .log = &log_, .gate = later, .opens = needed}));
  b->enqueue(operation({"target", &log_, needed}));
  b->synchronize();
  EXPECT_EQ(log_, (Log{"start first", "start target", "finish first", "closure", "start second",
                       "finish target"}));
  later->open();
  a->synchronize();
  EXPECT_EQ(log_.back(), "finish second");
}

TEST_F(StreamsTest, ABlockingOperationMovesOthersToo) {
  const auto needed = std::make_shared<Gate>();
  const auto a = stream("a");
  a->enqueue(operation({"first", &log_}));
  a->run(note("closure"));
  a->enqueue(operation({.name = "second", .log = &log_, .opens = needed}));
  progress_->run(operation({.name = "barrier", .log = &log_, .gate = needed, .rounds = 2}));
  a->synchronize();
}

TEST_F(StreamsTest, TheComputeStreamRunsOperationsToTheirEnds) {
  ComputeStream compute("compute", progress_);
  compute.enqueue(operation({"op", &log_}));
  compute.run(note("closure"));
  EXPECT_EQ(log_, (Log{"start op", "finish op", "closure"}));
}

TEST_F(StreamsTest, AFailureIsThrownAtTheWaitAndNothingBehindItRuns) {
  const auto s = stream("s");
  s->enqueue(operation({"good", &log_}));
  const comm::EventPtr before = s->record();
  s->enqueue(operation({.name = "bad", .log = &log_, .fails = true}));
  s->run(note("closure"));
  const comm::EventPtr after = s->record();
  const auto other = stream("other");
  other->wait(after);
  other->run(note("other"));
  before->synchronize();
  EXPECT_THROW(after->synchronize(), std::runtime_error);
  before->synchronize();
  EXPECT_THROW(s->synchronize(), std::runtime_error);
  EXPECT_THROW(s->run(note("closure")), std::runtime_error);
  EXPECT_THROW(other->synchronize(), std::runtime_error);
  EXPECT_EQ(log_, (Log{"start good", "finish good", "start bad"}));
}

TEST_F(StreamsTest, ClosuresRunInTheModeInWhichTheyWereQueued) {
  const auto s = stream("s");
  bool grad_mode = true;
  s->enqueue(operation({"op", &log_}));
  {
    const at::NoGradGuard no_grad;
    s->run([&] { grad_mode = at::GradMode::is_enabled(); });
  }
  s->synchronize();
  EXPECT_FALSE(grad_mode);
  EXPECT_TRUE(at::GradMode::is_enabled());
}

TEST_F(StreamsTest, AClosureThatWaitsForItsOwnStreamIsRefused) {
  const auto s = stream("s");
  s->enqueue(operation({"op", &log_}));
  s->run([&] { s->synchronize(); });
  EXPECT_THROW(s->synchronize(), c10::Error);
}

}  // namespace
}  // namespace ppfsdp::gloo
