#include "backends/nccl/runtime.h"

#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backends/nccl/communicator.h"
#include "backends/nccl/endpoint.h"
#include "backends/nccl/handle.h"
#include "backends/nccl/operations.h"
#include "backends/nccl/reporter.h"
#include "backends/nccl/streams.h"
#include "backends/nccl/watchdog.h"
#include "src/comm/text.h"

namespace ppfsdp::nccl {
namespace {

using std::chrono::milliseconds;

/// How long rank 0 waits for the others' goodbyes.
constexpr milliseconds kGoodbye{2000};
/// And after a failure for so many of the periods in which they look for one, but no longer.
constexpr int kHearing = 10;
/// CUDA's numbers: the lower, the more urgent.
constexpr int kHighPriority = -1;

std::shared_ptr<Reporter> make_reporter(const std::shared_ptr<Endpoint>& endpoint) {
  const Settings& settings = endpoint->settings;
  if (settings.world_size == 1) return nullptr;
  Reporter::Rank rank;
  rank.number = settings.rank;
  rank.world_size = settings.world_size;
  // The reporter is the endpoint's, so it must not hold it.
  const std::weak_ptr<Endpoint> weak = endpoint;
  rank.progress = [weak] {
    const auto endpoint = weak.lock();
    return endpoint == nullptr ? std::map<std::string, Progress>{} : endpoint->log.progress();
  };
  rank.waits = [weak] {
    const auto endpoint = weak.lock();
    return endpoint != nullptr && endpoint->waits();
  };
  rank.fail = [weak, number = settings.rank](const std::string& why) {
    if (const auto endpoint = weak.lock()) {
      endpoint->fail(fmt::format("{}; this is rank {}", why, number));
    }
  };
  return std::make_shared<Reporter>(settings.store->clone(), std::move(rank), settings.report,
                                    settings.silence);
}

GroupPtr make_world(const Settings& settings) {
  auto group = std::make_shared<Group>();
  group->name = "world";
  group->key = "world";
  group->ranks.resize(settings.world_size);
  std::iota(group->ranks.begin(), group->ranks.end(), 0);
  group->index = settings.rank;
  return group;
}

/// A copy of what the process's ranks would otherwise all draw from.
at::Generator own_generator(c10::Device device) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.clone();
}

/// What goes on in the background while a rank is there.
class Background {
 public:
  explicit Background(std::shared_ptr<Endpoint> endpoint) : endpoint_(std::move(endpoint)) {
    endpoint_->reporter = make_reporter(endpoint_);
    watchdog_.emplace(endpoint_);
  }
  ~Background() {
    watchdog_.reset();
    if (endpoint_->failed() && endpoint_->reporter != nullptr) {
      // The store ends with rank 0's process, and with it what it says of the cause.
      endpoint_->reporter->linger(std::min(kGoodbye, kHearing * endpoint_->settings.report));
    }
    endpoint_->reporter.reset();
    for (const auto& deferred : endpoint_->deferred()) deferred->end();
    endpoint_->clear();
  }
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

 private:
  const std::shared_ptr<Endpoint> endpoint_;
  std::optional<Watchdog> watchdog_;
};

class Runtime final : public NcclRuntime {
 public:
  explicit Runtime(Settings settings)
      : endpoint_(std::make_shared<Endpoint>(std::move(settings))),
        background_(endpoint_),
        guard_(endpoint_->settings.streams.type()),
        compute_(std::make_shared<NcclStream>("compute", endpoint_,
                                              guard_.getStream(endpoint_->settings.streams),
                                              /*compute=*/true)) {
    if (endpoint_->settings.shares_process) {
      generator_ = own_generator(endpoint_->settings.tensors);
    }
    try {
      join_world();
    } catch (const std::exception& error) {
      // Whatever it was, the others must not wait for this rank, and NCCL must end what it began.
      endpoint_->fail(
          fmt::format("starting NCCL on rank {}: {}", rank(), comm::first_line(error.what())));
      throw comm::CommError(endpoint_->failure());
    }
  }

  ~Runtime() override {
    if (std::uncaught_exceptions() > 0) {
      // The others would wait for this rank until their timeout.
      endpoint_->fail(fmt::format("rank {} left because an exception was thrown there", rank()));
    }
    if (endpoint_->failed()) return;
    try {
      end_in_order();
    } catch (const std::exception& error) {
      // The watchdog sees to the rest; here nobody is left to be told.
      endpoint_->fail(
          fmt::format("the end of rank {}: {}", rank(), comm::first_line(error.what())));
    }
  }

  int rank() const override { return endpoint_->settings.rank; }
  int world_size() const override { return endpoint_->settings.world_size; }
  c10::Device device() const override { return endpoint_->settings.tensors; }
  std::string backend() const override { return "nccl"; }
  comm::ReductionOrder reduction_order() const override { return comm::ReductionOrder::kNcclRing; }
  const comm::CommunicatorPtr& world() override { return world_; }
  comm::Stream& compute_stream() override { return *compute_; }

  std::shared_ptr<comm::Stream> create_stream(const std::string& name,
                                              comm::StreamPriority priority) override {
    endpoint_->check_alive();
    auto stream = std::make_shared<NcclStream>(
        name, endpoint_, new_stream(priority == comm::StreamPriority::kHigh ? kHighPriority : 0),
        /*compute=*/false);
    std::erase_if(streams_, [](const auto& other) { return other.expired(); });
    streams_.push_back(stream);
    return stream;
  }

  at::Generator default_generator() override {
    return generator_.defined() ? generator_ : comm::Runtime::default_generator();
  }
  comm::DeviceGrid device_grid() const override {
    const Hooks& hooks = endpoint_->settings.hooks;
    return hooks.device_grid ? hooks.device_grid() : comm::Runtime::device_grid();
  }
  comm::MemoryUse memory_use() const override {
    const Hooks& hooks = endpoint_->settings.hooks;
    return hooks.memory_use ? hooks.memory_use() : comm::Runtime::memory_use();
  }
  uint64_t host_waits() const override { return endpoint_->host_waits(); }

 private:
  void join_world() {
    // It is waited for in the call that uses it, as the compute stream is.
    const auto control =
        std::make_shared<NcclStream>("control", endpoint_, new_stream(0), /*compute=*/true);
    GroupPtr group = make_world(endpoint_->settings);
    auto handle = Handle::join_world(endpoint_, group);
    auto issuer = std::make_shared<Issuer>(endpoint_, std::move(group), std::move(handle));
    endpoint_->add(issuer);
    world_ = std::make_shared<NcclCommunicator>(std::move(issuer), control);
  }

  c10::Stream new_stream(int priority) const {
    return guard_.getNewStream(endpoint_->settings.streams, priority);
  }

  void end_in_order() {
    for (const auto& deferred : endpoint_->deferred()) deferred->issue();
    compute_->synchronize();
    for (const auto& weak : streams_) {
      if (const auto stream = weak.lock()) stream->synchronize();
    }
    for (const auto& deferred : endpoint_->deferred()) deferred->end();
    const Endpoint::Waits waits(*endpoint_);
    // Done when all ranks have come this far. The last groups are parts of earlier ones.
    auto handles = endpoint_->handles();
    std::reverse(handles.begin(), handles.end());
    Handle::finalize(handles, std::chrono::steady_clock::now() + endpoint_->settings.timeout);
    if (endpoint_->reporter != nullptr) endpoint_->reporter->leave(kGoodbye);
  }

  const std::shared_ptr<Endpoint> endpoint_;
  const Background background_;
  const c10::impl::VirtualGuardImpl guard_;
  const std::shared_ptr<NcclStream> compute_;
  at::Generator generator_;
  comm::CommunicatorPtr world_;
  std::vector<std::weak_ptr<NcclStream>> streams_;
};

}  // namespace

std::unique_ptr<NcclRuntime> make_runtime(Settings settings) {
  TORCH_CHECK(settings.world_size >= 1, "nccl: world_size must be at least 1, got ",
              settings.world_size);
  TORCH_CHECK(settings.rank >= 0 && settings.rank < settings.world_size,
              "nccl: rank must be in [0, ", settings.world_size, "), got ", settings.rank);
  TORCH_CHECK(settings.store.defined(), "nccl: there is no store for the ranks to meet in");
  TORCH_CHECK(settings.timeout.count() > 0, "nccl: timeout must be positive, got ",
              settings.timeout.count(), " ms");
  const int rank = settings.rank;
  try {
    return std::make_unique<Runtime>(std::move(settings));
  } catch (const c10::DistError& error) {
    throw comm::CommError(fmt::format("starting NCCL on rank {}: the store cannot be reached ({})",
                                      rank, comm::first_line(error.what())));
  }
}

}  // namespace ppfsdp::nccl
