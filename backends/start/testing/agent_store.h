#pragma once

#include <c10/util/intrusive_ptr.h>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace ppfsdp::start::testing {

/// A store that a launcher's agent serves, as torchrun's does, as long as the result lives.
/// `listen_fd`: a listening socket on `port` of the loopback interface, which it takes over.
c10::intrusive_ptr<c10d::Store> serve_agent_store(int port, int listen_fd);

}  // namespace ppfsdp::start::testing
