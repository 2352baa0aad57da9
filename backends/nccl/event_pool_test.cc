#include "backends/nccl/event_pool.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <vector>

#include "backends/nccl/fake/fake_device.h"

namespace ppfsdp::nccl {
namespace {

class EventPoolTest : public ::testing::Test {
 protected:
  EventPoolTest() { testing::set_rank_thread(0); }
  ~EventPoolTest() override { testing::set_rank_thread(-1); }

  c10::Stream new_stream() const {
    return c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1)
        .getNewStream(c10::Device(c10::DeviceType::PrivateUse1, 0));
  }

  testing::FakeDevices devices_;
  std::shared_ptr<EventPool> pool_ = std::make_shared<EventPool>(c10::DeviceType::PrivateUse1);
};

// An event made for each operation would cost more than the rest of its bookkeeping.
TEST_F(EventPoolTest, AStepOfManyOperationsMakesNoMoreEventsThanLiveAtOnce) {
  const c10::Stream stream = new_stream();
  for (int i = 0; i < 1000; ++i) {
    const EventPool::Handle first = pool_->record(stream);
    const EventPool::Handle second = pool_->record(stream);
  }
  EXPECT_EQ(pool_->made(), 2u);
}

TEST_F(EventPoolTest, EventsThatLiveAreNotGivenAgain) {
  const c10::Stream stream = new_stream();
  std::vector<EventPool::Handle> events;
  for (int i = 0; i < 10; ++i) events.push_back(pool_->record(stream));
  EXPECT_EQ(pool_->made(), 10u);
  for (int i = 0; i < 10; ++i) {
    for (int k = 0; k < i; ++k) EXPECT_NE(events[i].get(), events[k].get());
  }
}

TEST_F(EventPoolTest, AnEventOutlivesItsPoolsOwner) {
  EventPool::Handle event = pool_->record(new_stream());
  pool_.reset();
  EXPECT_TRUE(event->query());
  event.reset();
}

}  // namespace
}  // namespace ppfsdp::nccl
