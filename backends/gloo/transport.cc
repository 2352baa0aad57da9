#include "backends/gloo/transport.h"

#include <fmt/format.h>
#include <sched.h>

#include <cstdlib>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <utility>
#include <vector>

#include "backends/start/meeting.h"
#include "src/comm/communicator.h"
#include "src/comm/text.h"

namespace ppfsdp::gloo {
namespace {

/// While it lives, threads that this one starts get Linux's SCHED_BATCH policy: they run when a
/// core is free and with their fair share, but do not interrupt a running thread when they wake.
/// Gloo's device thread must not: it spins while a rank's thread, in the middle of posting a
/// transfer, holds a connection's lock, and when it has taken the core from that very thread it
/// spins for a whole time slice (4 ms for an operation of 100 us, when there are no more cores than
/// ranks).
class StartsPatientThreads {
 public:
  StartsPatientThreads() : policy_(::sched_getscheduler(0)) {
    const sched_param none{};
    // Only a thread of the default policy: somebody chose another one with care.
    if (policy_ == SCHED_OTHER) changed_ = ::sched_setscheduler(0, SCHED_BATCH, &none) == 0;
  }
  ~StartsPatientThreads() {
    const sched_param none{};
    if (changed_) ::sched_setscheduler(0, policy_, &none);
  }
  StartsPatientThreads(const StartsPatientThreads&) = delete;
  StartsPatientThreads& operator=(const StartsPatientThreads&) = delete;

 private:
  int policy_;
  bool changed_ = false;
};

std::shared_ptr<::gloo::transport::Device> make_device(const std::string& address) {
  using c10d::ProcessGroupGloo;
  const StartsPatientThreads patience;
  const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
  if (interface != nullptr && *interface != '\0') {
    return ProcessGroupGloo::createDeviceForInterface(interface);
  }
  return ProcessGroupGloo::createDeviceForHostname(address);
}

}  // namespace

struct Transport::State {
  c10::intrusive_ptr<c10d::ProcessGroupGloo> group;
  /// The argument that Gloo's calls take, kept to save its allocation.
  std::vector<at::Tensor> argument = std::vector<at::Tensor>(1);
};

Transport::Transport(const GlooOptions& options) : state_(std::make_unique<State>()) {
  start::Meeting meeting = start::meet(options);
  auto settings = c10d::ProcessGroupGloo::Options::create(options.timeout);
  // Only Gloo's own collectives would use its worker threads.
  settings->threads = 1;
  try {
    settings->devices.push_back(make_device(meeting.address));
    state_->group = c10::make_intrusive<c10d::ProcessGroupGloo>(
        meeting.store, options.rank, options.world_size, std::move(settings));
  } catch (const std::exception& error) {
    throw comm::CommError(fmt::format("rank {} of {} could not connect to the other ranks: {}",
                                      options.rank, options.world_size,
                                      comm::first_line(error.what())));
  }
}

Transport::~Transport() = default;

Transfer Transport::send(const at::Tensor& tensor, int peer, uint32_t tag) {
  state_->argument[0] = tensor;
  return state_->group->send(state_->argument, peer, static_cast<int>(tag));
}

Transfer Transport::recv(const at::Tensor& tensor, int peer, uint32_t tag) {
  state_->argument[0] = tensor;
  return state_->group->recv(state_->argument, peer, static_cast<int>(tag));
}

bool Transport::wait(const Transfer& transfer, std::chrono::milliseconds timeout) {
  return static_cast<c10d::Work*>(transfer.get())->wait(timeout);
}

void Transport::abort(const Transfer& transfer) {
  static_cast<c10d::Work*>(transfer.get())->abort();
}

}  // namespace ppfsdp::gloo
