#include "backends/start/testing/agent_store.h"

#include <cstdint>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace ppfsdp::start::testing {

c10::intrusive_ptr<c10d::Store> serve_agent_store(int port, int listen_fd) {
  c10d::TCPStoreOptions settings;
  settings.port = static_cast<uint16_t>(port);
  settings.isServer = true;
  settings.waitWorkers = false;
  settings.masterListenFd = listen_fd;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", settings);
}

}  // namespace ppfsdp::start::testing
