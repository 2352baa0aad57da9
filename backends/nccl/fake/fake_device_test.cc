#include "backends/nccl/fake/fake_device.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace ppfsdp::nccl::testing {
namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kType, 0);

/// Done when it is told.
class Gate final : public StreamTask {
 public:
  Gate(const bool& open, std::function<void()> work) : open_(open), work_(std::move(work)) {}
  bool poll() override {
    if (open_) work_();
    return open_;
  }

 private:
  const bool& open_;
  std::function<void()> work_;
};

class FakeDeviceTest : public ::testing::TestWithParam<FakeDeviceOptions> {
 protected:
  void SetUp() override {
    devices_ = std::make_unique<FakeDevices>(GetParam());
    set_rank_thread(0);
  }
  void TearDown() override {
    EXPECT_THAT(devices_->faults(), ::testing::IsEmpty());
    set_rank_thread(-1);
  }

  static c10::impl::VirtualGuardImpl guard() { return c10::impl::VirtualGuardImpl(kType); }
  static c10::Stream new_stream() { return guard().getNewStream(kDevice); }

  /// Work that waits for open().
  void enqueue(const c10::Stream& stream, std::function<void()> work) {
    auto& queue = *static_cast<FakeStream*>(stream.native_handle());
    const auto held = devices_->lock();
    devices_->enqueue(queue, std::make_unique<Gate>(open_, std::move(work)));
  }
  void open() {
    const auto held = devices_->lock();
    open_ = true;
    devices_->wake();
  }

  std::unique_ptr<FakeDevices> devices_;
  bool open_ = false;
};

TEST_P(FakeDeviceTest, WorkIsDoneLaterAndInOrder) {
  const c10::Stream stream = new_stream();
  std::vector<int> order;
  for (int i = 0; i < 3; ++i) {
    enqueue(stream, [&, i] { order.push_back(i); });
  }
  EXPECT_FALSE(stream.query()) << "work was done at once";
  open();
  stream.synchronize();
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(devices_->host_waits(0).streams, 1u);
  EXPECT_EQ(devices_->host_waits(1).total(), 0u) << "another device's";
}

TEST_P(FakeDeviceTest, AStreamWaitsForAnothersEvent) {
  const c10::Stream first = new_stream(), second = new_stream();
  std::vector<int> order;
  enqueue(first, [&] { order.push_back(0); });
  c10::Event event(kType);
  event.record(first);
  // Not what came before its event on the other stream.
  event.block(second);
  bool always = true;
  {
    const auto held = devices_->lock();
    devices_->enqueue(*static_cast<FakeStream*>(second.native_handle()),
                      std::make_unique<Gate>(always, [&] { order.push_back(1); }));
  }
  EXPECT_FALSE(event.query());
  open();
  c10::Event end(kType);
  end.record(second);
  end.synchronize();
  EXPECT_TRUE(event.query());
  EXPECT_EQ(order, (std::vector<int>{0, 1}));
  EXPECT_EQ(devices_->host_waits(0).events, 1u);
}

TEST_P(FakeDeviceTest, AnOperationWaitsForTheThreadsStream) {
  const at::Tensor tensor = at::zeros({3});
  float* data = tensor.mutable_data_ptr<float>();
  const c10::Stream side = new_stream();
  enqueue(side, [=] { data[0] = 1; });
  enqueue(guard().getDefaultStream(kDevice), [=] { data[1] = 2; });
  std::thread opener([&] { open(); });
  // The compute stream's work is there for the next operation, and a side stream's under its guard.
  EXPECT_EQ(tensor.add(0)[1].item<float>(), 2.0f);
  {
    const c10::StreamGuard under(side);
    tensor.add_(10);
  }
  EXPECT_EQ(tensor[0].item<float>(), 11.0f);
  opener.join();
  const HostWaits waits = devices_->host_waits(0);
  EXPECT_EQ(waits.streams + waits.events + waits.devices, 0u) << "a stand-in for order counted";
  EXPECT_EQ(waits.scalars, 2u) << "item() waits for a GPU";
}

TEST_P(FakeDeviceTest, TheDefaultStreamsWaitIsThere) {
  const c10::Stream side = new_stream();
  float value = 0;
  enqueue(side, [&] { value = 3; });
  c10::Event event(kType);
  event.record(side);
  std::thread opener([&] { open(); });
  event.block(guard().getDefaultStream(kDevice));
  EXPECT_EQ(value, 3.0f);
  opener.join();
  EXPECT_EQ(devices_->host_waits(0).total(), 0u);
}

// As CUDA's caching allocator: what one stream's memory is to another stream it does not know.
TEST_P(FakeDeviceTest, FreedMemoryIsKeptForItsOwnStreamAndThoseRecorded) {
  const c10::Stream owner = new_stream(), user = new_stream();
  std::vector<float> seen;
  const auto read_after_free = [&](bool record) {
    open_ = false;
    const c10::StreamGuard under(owner);
    at::Tensor tensor = at::empty({100});
    EXPECT_TRUE(std::isnan(tensor.const_data_ptr<float>()[99])) << "fresh memory has values";
    tensor.fill_(5);
    const float* data = tensor.const_data_ptr<float>();
    if (record) guard().recordDataPtrOnStream(tensor.storage().data_ptr(), user);
    enqueue(user, [&, data] { seen.push_back(data[7]); });
    tensor.reset();
    open();
    user.synchronize();
  };
  read_after_free(true);
  read_after_free(false);
  EXPECT_EQ(seen[0], 5.0f);
  EXPECT_TRUE(std::isnan(seen[1])) << "a use that the memory's stream does not know of went unseen";
}

TEST_P(FakeDeviceTest, FreedMemoryIsKeptForWorkOfItsStream) {
  const c10::Stream owner = new_stream();
  float seen = 0;
  {
    const c10::StreamGuard under(owner);
    const at::Tensor tensor = at::full({100}, 5.0);
    const float* data = tensor.const_data_ptr<float>();
    enqueue(owner, [&, data] { seen = data[7]; });
  }
  open();
  owner.synchronize();
  EXPECT_EQ(seen, 5.0f);
}

TEST(FakeDevice, AWriteToFreedMemoryIsAFault) {
  FakeDevices devices;
  set_rank_thread(0);
  float* data = nullptr;
  {
    const at::Tensor tensor = at::empty({100});
    data = tensor.mutable_data_ptr<float>();
  }
  data[50] = 1;
  EXPECT_THAT(devices.faults(),
              ::testing::ElementsAre(::testing::HasSubstr("was written after it was freed")));
  set_rank_thread(-1);
}

TEST(FakeDevice, LateStreamsStayUntilSomebodyWaits) {
  FakeDeviceOptions options;
  options.late = true;
  options.patience = std::chrono::hours(1);
  FakeDevices devices(options);
  set_rank_thread(0);
  FakeStream &first = devices.new_stream(0, 0), &second = devices.new_stream(0, 0),
             &third = devices.new_stream(0, 0);
  std::vector<int> order;
  const bool always = true;
  StreamPoint end;
  {
    auto held = devices.lock();
    const StreamPoint point =
        devices.enqueue(first, std::make_unique<Gate>(always, [&] { order.push_back(1); }));
    devices.enqueue(third, std::make_unique<Gate>(always, [&] { order.push_back(3); }));
    class Needy final : public StreamTask {
     public:
      Needy(StreamPoint point, std::vector<int>& order) : point_(point), order_(order) {}
      bool poll() override {
        if (point_.reached()) order_.push_back(2);
        return point_.reached();
      }
      void add_needs(std::vector<StreamPoint>& points) const override { points.push_back(point_); }

     private:
      StreamPoint point_;
      std::vector<int>& order_;
    };
    end = devices.enqueue(second, std::make_unique<Needy>(point, order));
    devices.wait(held, end);
    EXPECT_EQ(order, (std::vector<int>{1, 2})) << "a stream went on that nobody waits for";
    devices.wait(held, third.end());
  }
  EXPECT_EQ(order, (std::vector<int>{1, 2, 3}));
  set_rank_thread(-1);
}

TEST(FakeDevice, ADroppedWaitShows) {
  FakeDeviceOptions options;
  options.dropped_wait = 2;
  FakeDevices devices(options);
  set_rank_thread(0);
  const c10::impl::VirtualGuardImpl guard(kType);
  const c10::Stream side = guard.getNewStream(kDevice), other = guard.getNewStream(kDevice);
  bool open = false;
  {
    const auto held = devices.lock();
    devices.enqueue(*static_cast<FakeStream*>(side.native_handle()),
                    std::make_unique<Gate>(open, [] {}));
  }
  c10::Event event(kType);
  event.record(side);
  const c10::Stream third = guard.getNewStream(kDevice);
  event.block(third);
  event.block(other);
  EXPECT_FALSE(third.query());
  EXPECT_TRUE(other.query());
  set_rank_thread(-1);
}

// What polls instead of blocking must get ahead as well, and be seen.
TEST(FakeDevice, AskingAgainAndAgainIsAWait) {
  FakeDeviceOptions options;
  options.late = true;
  options.patience = std::chrono::hours(1);
  FakeDevices devices(options);
  set_rank_thread(0);
  FakeStream& stream = devices.new_stream(0, 0);
  const bool always = true;
  {
    const auto held = devices.lock();
    devices.enqueue(stream, std::make_unique<Gate>(always, [] {}));
  }
  c10::Event event(kType);
  event.record(c10::Stream(c10::Stream::UNSAFE, kDevice, reinterpret_cast<c10::StreamId>(&stream)));
  EXPECT_FALSE(event.query());
  EXPECT_EQ(devices.host_waits(0).total(), 0u) << "a single question counted";
  while (!event.query()) std::this_thread::yield();
  EXPECT_GE(devices.host_waits(0).polls, 1u);
  set_rank_thread(-1);
}

TEST(FakeDevice, EachThreadHasItsDeviceAndStream) {
  FakeDevices devices;
  const c10::impl::VirtualGuardImpl guard(kType);
  std::thread([&] {
    guard.setDevice(c10::Device(kType, 3));
    const c10::Stream side = guard.getNewStream(c10::Device(kType, 3));
    const c10::StreamGuard under(side);
    EXPECT_EQ(guard.getStream(c10::Device(kType, 3)), side);
    std::thread([&] {
      EXPECT_EQ(current_device(), -1);
      EXPECT_EQ(guard.getStream(c10::Device(kType, 3)), guard.getDefaultStream({kType, 3}));
    }).join();
  }).join();
  EXPECT_EQ(current_stream(), nullptr);
}

INSTANTIATE_TEST_SUITE_P(Streams, FakeDeviceTest,
                         ::testing::Values(FakeDeviceOptions{}, FakeDeviceOptions{.late = true},
                                           FakeDeviceOptions{.late = true, .seed = 1}),
                         [](const auto& info) {
                           return (info.param.late ? "Late" : "Prompt") +
                                  std::to_string(info.param.seed);
                         });

}  // namespace
}  // namespace ppfsdp::nccl::testing
