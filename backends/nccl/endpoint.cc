#include "backends/nccl/endpoint.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "backends/nccl/handle.h"
#include "backends/nccl/streams.h"
#include "src/comm/communicator.h"

namespace ppfsdp::nccl {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

/// How long a failed rank waits for its device to stop, and for the store to say why.
constexpr milliseconds kGrace{2000};
/// A report is old after so many periods; ranks send one every third at least.
constexpr int kFreshPeriods = 6;

std::string in_words(const What& what, const std::string& why) {
  return fmt::format("{}: {}; this is rank {}", what.to_string(), why, what.group->rank());
}

}  // namespace

Endpoint::Endpoint(Settings given)
    : settings(std::move(given)), events(std::make_shared<EventPool>(settings.streams.type())) {}

void Endpoint::check_alive() const {
  if (failed_) throw comm::CommError(failure());
}

std::string Endpoint::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void Endpoint::fail(const std::string& message) {
  const std::lock_guard lock(mutex_);
  if (!failed_) failure_ = message;
  failed_ = true;
  awake_ = true;
  woken_.notify_all();
}

void Endpoint::fail_asking(const What& what, const std::string& why) {
  if (failed_) return;
  if (reporter == nullptr) return fail(in_words(what, why));
  const Reporter::Found found = reporter->collect(what.group->ranks, kGrace);
  // What a failed rank says is the cause; that this rank's communication ended is a consequence.
  if (found.failure) return fail(in_words(what, *found.failure));
  const auto progress = log.progress();
  const auto mine = progress.find(what.group->key);
  const std::string others =
      found.answered
          ? describe_others(*what.group, mine == progress.end() ? Progress{} : mine->second,
                            found.reports, std::chrono::system_clock::now(),
                            kFreshPeriods * settings.report)
          : "the store on rank 0 does not answer, so nothing is known of the others";
  fail(in_words(what, why) + (others.empty() ? "" : "; " + others));
}

void Endpoint::raise_asking(const What& what, const std::string& why) {
  fail_asking(what, why);
  throw comm::CommError(failure());
}

void Endpoint::raise(const What& what, const std::string& why) {
  fail(in_words(what, why));
  throw comm::CommError(failure());
}

void Endpoint::host_wait(const c10::Event& event) {
  check_alive();
  ++host_waits_;
  const auto begin = steady_clock::now();
  steady_clock::time_point failed_at{};
  // Asks instead of blocking in the driver, which would not return from a device that hangs.
  while (!event.query()) {
    const auto now = steady_clock::now();
    if (failed_) {
      if (failed_at == steady_clock::time_point{}) failed_at = now;
      if (aborted_ || now - failed_at > kGrace) break;
    }
    if (now - begin < microseconds(200)) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(microseconds(20));
    }
  }
  check_alive();
}

bool Endpoint::wait_for_key(const std::string& key) const {
  const Waits waits(*this);
  const auto deadline = steady_clock::now() + settings.timeout;
  for (milliseconds pause{1};; pause = std::min(pause * 2, milliseconds(50))) {
    check_alive();
    if (settings.store->check({key})) return true;
    if (steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(pause);
  }
}

void Endpoint::rest(milliseconds period) {
  std::unique_lock lock(mutex_);
  woken_.wait_for(lock, period, [&] { return awake_; });
  awake_ = false;
}

void Endpoint::wake() {
  const std::lock_guard lock(mutex_);
  awake_ = true;
  woken_.notify_all();
}

void Endpoint::add(std::shared_ptr<Handle> handle) {
  {
    const std::lock_guard lock(mutex_);
    handles_.push_back(std::move(handle));
  }
  check_alive();
}

std::vector<std::shared_ptr<Handle>> Endpoint::handles() const {
  const std::lock_guard lock(mutex_);
  return handles_;
}

void Endpoint::add(std::shared_ptr<Deferred> deferred) {
  const std::lock_guard lock(mutex_);
  deferred_.push_back(std::move(deferred));
}

std::vector<std::shared_ptr<Deferred>> Endpoint::deferred() const {
  const std::lock_guard lock(mutex_);
  return deferred_;
}

void Endpoint::keep_until_end(at::Tensor tensor) {
  const std::lock_guard lock(mutex_);
  if (!ended_) kept_.push_back(std::move(tensor));
}

void Endpoint::clear() {
  std::vector<std::shared_ptr<Handle>> handles;
  std::vector<std::shared_ptr<Deferred>> deferred;
  std::vector<at::Tensor> kept;
  const std::lock_guard lock(mutex_);
  ended_ = true;
  kept.swap(kept_);
  handles.swap(handles_);
  deferred.swap(deferred_);
}

}  // namespace ppfsdp::nccl
