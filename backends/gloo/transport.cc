#include "backends/gloo/transport.h"

#include <fmt/format.h>

#include <cstdlib>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <utility>
#include <vector>

#include "backends/gloo/rendezvous.h"
#include "backends/gloo/text.h"
#include "src/comm/communicator.h"

namespace ppfsdp::gloo {
namespace {

std::shared_ptr<::gloo::transport::Device> make_device(const std::string& address) {
  using c10d::ProcessGroupGloo;
  const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
  if (interface != nullptr && *interface != '\0') {
    return ProcessGroupGloo::createDeviceForInterface(interface);
  }
  if (is_loopback(address)) return ProcessGroupGloo::createDeviceForHostname(address);
  return ProcessGroupGloo::createDefaultDevice();
}

}  // namespace

struct Transport::State {
  c10::intrusive_ptr<c10d::ProcessGroupGloo> group;
  /// The argument that Gloo's calls take, kept to save its allocation.
  std::vector<at::Tensor> argument = std::vector<at::Tensor>(1);
};

Transport::Transport(const GlooOptions& options) : state_(std::make_unique<State>()) {
  Meeting meeting = meet(options);
  auto settings = c10d::ProcessGroupGloo::Options::create(options.timeout);
  // Only Gloo's own collectives would use its worker threads.
  settings->threads = 1;
  try {
    settings->devices.push_back(make_device(meeting.address));
    state_->group = c10::make_intrusive<c10d::ProcessGroupGloo>(
        meeting.store, options.rank, options.world_size, std::move(settings));
  } catch (const std::exception& error) {
    throw comm::CommError(fmt::format("rank {} of {} could not connect to the other ranks: {}",
                                      options.rank, options.world_size, first_line(error.what())));
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
