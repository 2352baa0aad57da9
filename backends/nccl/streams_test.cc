#include "backends/nccl/streams.h"

#include <ATen/ops/full.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "backends/nccl/fake/fake_device.h"
#include "src/comm/communicator.h"
#include "src/comm/eager_stream.h"

namespace ppfsdp::nccl {
namespace {

const c10::Device kDevice(c10::DeviceType::PrivateUse1, 0);

Settings make_settings() {
  Settings settings;
  settings.store = c10::make_intrusive<c10d::HashStore>();
  settings.tensors = c10::Device(c10::kCPU);
  settings.streams = kDevice;
  return settings;
}

class StreamsTest : public ::testing::Test {
 protected:
  StreamsTest() { testing::set_rank_thread(0); }
  ~StreamsTest() override { testing::set_rank_thread(-1); }

  static c10::impl::VirtualGuardImpl guard() { return c10::impl::VirtualGuardImpl(kDevice.type()); }
  std::shared_ptr<NcclStream> make(const std::string& name) const {
    return std::make_shared<NcclStream>(name, endpoint_, guard().getNewStream(kDevice), false);
  }
  /// A tensor that `stream` alone keeps, as a communication's is, and what tells whether it lives.
  c10::weak_intrusive_ptr<c10::TensorImpl> kept_by(NcclStream& stream) const {
    const at::Tensor tensor = at::full({3}, 1.0);
    stream.keep(tensor, {});
    return c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr());
  }

  testing::FakeDevices devices_;
  std::shared_ptr<Endpoint> endpoint_ = std::make_shared<Endpoint>(make_settings());
  std::shared_ptr<NcclStream> compute_ = std::make_shared<NcclStream>(
      "compute", endpoint_, guard().getStream(kDevice), /*compute=*/true);
};

// What LibTorch launches in a closure would land on the compute stream.
TEST_F(StreamsTest, AClosureRunsAtOnceWithTheStreamAsTheCurrentOne) {
  const auto side = make("side");
  const c10::Stream before = guard().getStream(kDevice);
  bool ran = false;
  side->run([&] {
    ran = true;
    EXPECT_EQ(guard().getStream(kDevice), side->stream());
  });
  EXPECT_TRUE(ran);
  EXPECT_EQ(guard().getStream(kDevice), before);
  EXPECT_THROW(side->run([] { throw std::runtime_error("x"); }), std::runtime_error);
  EXPECT_EQ(guard().getStream(kDevice), before) << "an error leaves the stream set";
}

TEST_F(StreamsTest, AnEventOfAnotherBackendIsRefused) {
  comm::EagerStream other("other");
  try {
    compute_->wait(other.record());
    FAIL() << "waited";
  } catch (const c10::Error& error) {
    EXPECT_THAT(
        error.what_without_backtrace(),
        ::testing::HasSubstr("stream 'compute' of the NCCL backend cannot wait for an event "
                             "of another backend"));
  }
  try {
    as_nccl(other);
    FAIL() << "taken";
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what_without_backtrace(),
                ::testing::HasSubstr("stream 'other' is not of the NCCL backend"));
  }
}

// Freed earlier, its memory would go to what the compute stream does meanwhile; freed later, the
// peak of memory would depend on timing.
TEST_F(StreamsTest, TensorsAreKeptUntilTheComputeStreamHasWaited) {
  const auto side = make("side");
  const auto before = side->record();
  const auto tensor = kept_by(*side);
  const auto behind = side->record();
  compute_->wait(before);
  EXPECT_FALSE(tensor.expired()) << "by an event before the communication";
  make("another")->wait(behind);
  EXPECT_FALSE(tensor.expired()) << "by a wait that the compute stream did not make";
  compute_->wait(behind);
  EXPECT_TRUE(tensor.expired());
  EXPECT_EQ(side->kept(), 0u);
}

TEST_F(StreamsTest, OnlyWhatIsBeforeTheEventIsReleased) {
  const auto side = make("side");
  const auto first = kept_by(*side);
  const auto event = side->record();
  const auto second = kept_by(*side);
  compute_->wait(event);
  EXPECT_TRUE(first.expired());
  EXPECT_FALSE(second.expired());
  side->synchronize();
  EXPECT_TRUE(second.expired());
}

// Reduce-scatter, then all-reduce on a stream of its own: the compute stream waits for that alone.
TEST_F(StreamsTest, AWaitThroughOtherStreamsReleasesToo) {
  const auto first = make("first"), second = make("second"), third = make("third");
  const auto early = kept_by(*first);
  const auto event = first->record();
  const auto late = kept_by(*first);
  second->wait(event);
  third->wait(second->record());
  const auto third_event = third->record();
  EXPECT_FALSE(early.expired());
  compute_->wait(third_event);
  EXPECT_TRUE(early.expired());
  EXPECT_FALSE(late.expired()) << "nobody has waited for it";
  first->synchronize();
}

TEST_F(StreamsTest, AWaitAfterTheEventIsNotBehindIt) {
  const auto first = make("first"), second = make("second");
  const auto tensor = kept_by(*first);
  const auto before = second->record();
  second->wait(first->record());
  compute_->wait(before);
  EXPECT_FALSE(tensor.expired());
  compute_->wait(second->record());
  EXPECT_TRUE(tensor.expired());
}

TEST_F(StreamsTest, StreamsThatWaitForEachOtherReleaseAll) {
  const auto first = make("first"), second = make("second");
  const auto one = kept_by(*first), two = kept_by(*second);
  first->wait(second->record());
  second->wait(first->record());
  const auto three = kept_by(*first);
  compute_->wait(first->record());
  EXPECT_TRUE(one.expired() && two.expired() && three.expired());
  compute_->wait(second->record());
  EXPECT_EQ(first->kept() + second->kept(), 0u);
}

TEST_F(StreamsTest, AHostsWaitReleasesAndIsCounted) {
  const auto side = make("side");
  const auto tensor = kept_by(*side);
  const uint64_t before = endpoint_->host_waits();
  const auto event = side->record();
  compute_->wait(event);
  side->wait(compute_->record());
  EXPECT_EQ(endpoint_->host_waits(), before) << "a stream's wait is no host's";
  const auto again = kept_by(*side);
  side->record()->synchronize();
  EXPECT_TRUE(again.expired());
  EXPECT_EQ(endpoint_->host_waits(), before + 1);
  side->synchronize();
  EXPECT_EQ(endpoint_->host_waits(), before + 2);
}

TEST_F(StreamsTest, TheComputeStreamKeepsNothing) { EXPECT_TRUE(kept_by(*compute_).expired()); }

/// Counts how often it had to be issued.
class Counter final : public Deferred {
 public:
  void issue() override { ++issued; }
  void end() override {}
  int issued = 0;
};

// Used without it, the stream's next work would overtake the communication.
TEST_F(StreamsTest, WhatIsDeferredIsIssuedOnceBeforeAnyUse) {
  const auto side = make("side");
  const std::vector<std::pair<std::string, std::function<void()>>> uses = {
      {"run", [&] { side->run([] {}); }},
      {"record", [&] { side->record(); }},
      {"wait", [&] { side->wait(nullptr); }},
      {"synchronize", [&] { side->synchronize(); }},
  };
  for (const auto& [name, use] : uses) {
    const auto counter = std::make_shared<Counter>();
    side->defer(counter);
    side->defer(counter);
    EXPECT_EQ(counter->issued, 0);
    use();
    EXPECT_EQ(counter->issued, 1) << name;
    use();
    EXPECT_EQ(counter->issued, 1) << name;
  }
}

TEST_F(StreamsTest, AFailedRanksStreamsThrowTheReason) {
  const auto side = make("side");
  const auto event = side->record();
  endpoint_->fail("the reason");
  endpoint_->fail("a consequence");
  endpoint_->set_aborted();
  const std::vector<std::function<void()>> uses = {
      [&] { side->run([] { ADD_FAILURE() << "ran"; }); },
      [&] { side->record(); },
      [&] { compute_->wait(event); },
      [&] { side->synchronize(); },
      [&] { event->synchronize(); },
  };
  for (const auto& use : uses) {
    try {
      use();
      ADD_FAILURE() << "no error";
    } catch (const comm::CommError& error) {
      EXPECT_STREQ(error.what(), "the reason");
    }
  }
}

}  // namespace
}  // namespace ppfsdp::nccl
