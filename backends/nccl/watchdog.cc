#include "backends/nccl/watchdog.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <exception>
#include <utility>
#include <vector>

#include "backends/nccl/check.h"
#include "backends/nccl/handle.h"
#include "src/comm/text.h"

namespace ppfsdp::nccl {
namespace {

using std::chrono::steady_clock;

/// Works looked at while the rank's thread cannot add one.
constexpr size_t kAtOnce = 16;
/// What a failed rank gives the store to take its message before it aborts.
constexpr std::chrono::milliseconds kPublishing{1000};

}  // namespace

Watchdog::Watchdog(std::shared_ptr<Endpoint> endpoint)
    : endpoint_(std::move(endpoint)), thread_([this] { run(); }) {}

Watchdog::~Watchdog() {
  stopping_ = true;
  endpoint_->wake();
  thread_.join();
}

void Watchdog::run() {
  // Events and communicators are of this device; a new thread's is another.
  c10::impl::VirtualGuardImpl(endpoint_->settings.streams.type())
      .setDevice(endpoint_->settings.streams);
  for (;;) {
    endpoint_->rest(endpoint_->settings.poll);
    if (!endpoint_->failed()) {
      try {
        look();
      } catch (const std::exception& error) {
        endpoint_->fail(fmt::format("the device failed: {}; this is rank {}",
                                    comm::first_line(error.what()), endpoint_->settings.rank));
      }
    }
    if (endpoint_->failed()) return end_failed_rank();
    if (stopping_) return;
  }
}

void Watchdog::look() {
  const auto is_done = [](const Work& work) { return work.end->query(); };
  std::vector<Work> compared;
  while (endpoint_->log.sweep(is_done, kAtOnce, compared)) {
  }
  for (const Work& work : compared) {
    if (const auto difference = work.check->find_difference()) {
      return endpoint_->fail(fmt::format("{}: {}; this is rank {}", work.what.to_string(),
                                         *difference, work.what.group->rank()));
    }
  }
  for (const auto& handle : endpoint_->handles()) {
    const std::string error = handle->find_error();
    if (error.empty()) continue;
    if (const auto what = endpoint_->log.find_oldest(handle->group())) {
      return endpoint_->fail_asking(*what, error);
    }
    return endpoint_->fail(fmt::format("group '{}', with nothing under way: {}; this is rank {}",
                                       handle->group().name, error, endpoint_->settings.rank));
  }
  const auto timeout = endpoint_->settings.timeout;
  if (const auto what = endpoint_->log.find_older(steady_clock::now() - timeout)) {
    endpoint_->fail_asking(*what, fmt::format("was not done within {}", comm::seconds(timeout)));
  }
}

void Watchdog::end_failed_rank() {
  // First the reason, then the abort, of which the others would notice the consequences.
  if (endpoint_->reporter != nullptr) {
    endpoint_->reporter->publish_failure(endpoint_->failure(), kPublishing);
  }
  Handle::abort(endpoint_->handles());
  endpoint_->set_aborted();
}

}  // namespace ppfsdp::nccl
