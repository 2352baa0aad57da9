#include "backends/nccl/watchdog.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <future>
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
/// For the thread's end: an abort that was published takes NCCL a moment.
constexpr std::chrono::seconds kPatience{10};

}  // namespace

/// What the thread has of its own, so that it can be left behind.
struct Watchdog::State {
  explicit State(std::shared_ptr<Endpoint> endpoint) : endpoint(std::move(endpoint)) {}

  const std::shared_ptr<Endpoint> endpoint;
  std::atomic<bool> stopping{false};
  std::promise<void> ended;
};

Watchdog::Watchdog(std::shared_ptr<Endpoint> endpoint)
    : state_(std::make_shared<State>(std::move(endpoint))), thread_([state = state_] {
        run(*state);
        state->ended.set_value();
      }) {}

Watchdog::~Watchdog() {
  state_->stopping = true;
  state_->endpoint->wake();
  if (state_->ended.get_future().wait_for(kPatience) == std::future_status::ready) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

void Watchdog::run(State& state) {
  Endpoint& endpoint = *state.endpoint;
  try {
    // Events and communicators are of this device; a new thread's is another.
    c10::impl::VirtualGuardImpl(endpoint.settings.streams.type())
        .setDevice(endpoint.settings.streams);
  } catch (const std::exception& error) {
    endpoint.fail(fmt::format("the device failed: {}; this is rank {}",
                              comm::first_line(error.what()), endpoint.settings.rank));
  }
  for (;;) {
    endpoint.rest(endpoint.settings.poll);
    if (!endpoint.failed()) {
      try {
        look(endpoint);
      } catch (const std::exception& error) {
        endpoint.fail(fmt::format("the device failed: {}; this is rank {}",
                                  comm::first_line(error.what()), endpoint.settings.rank));
      }
    }
    if (endpoint.failed()) return end_failed_rank(endpoint);
    if (state.stopping) return;
  }
}

void Watchdog::look(Endpoint& endpoint) {
  const auto is_done = [](const Work& work) { return work.end->query(); };
  std::vector<Work> compared;
  while (endpoint.log.sweep(is_done, kAtOnce, compared)) {
  }
  for (const Work& work : compared) {
    if (const auto difference = work.check->find_difference()) {
      return endpoint.fail(fmt::format("{}: {}; this is rank {}", work.what.to_string(),
                                       *difference, work.what.group->rank()));
    }
  }
  for (const auto& handle : endpoint.handles()) {
    const std::string error = handle->find_error();
    if (error.empty()) continue;
    if (const auto what = endpoint.log.find_oldest(handle->group())) {
      return endpoint.fail_asking(*what, error);
    }
    return endpoint.fail(fmt::format("group '{}', with nothing under way: {}; this is rank {}",
                                     handle->group().name, error, endpoint.settings.rank));
  }
  const auto timeout = endpoint.settings.timeout;
  if (const auto what = endpoint.log.find_older(steady_clock::now() - timeout)) {
    endpoint.fail_asking(*what, fmt::format("was not done within {}", comm::seconds(timeout)));
  }
}

void Watchdog::end_failed_rank(Endpoint& endpoint) {
  // First the reason, then the abort, of which the others would notice the consequences.
  if (endpoint.reporter != nullptr) {
    endpoint.reporter->publish_failure(endpoint.failure(), kPublishing);
  }
  Handle::abort(endpoint.handles());
  endpoint.set_aborted();
}

}  // namespace ppfsdp::nccl
