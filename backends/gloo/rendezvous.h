#pragma once

#include <c10/util/intrusive_ptr.h>

#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "backends/gloo/gloo.h"

namespace ppfsdp::gloo {

/// The store that all ranks share once they have met.
struct Meeting {
  c10::intrusive_ptr<c10d::Store> store;
  /// master_addr as an IP address.
  std::string address;
};

/// Rank 0 opens master_port and the others come to it. Returns when all ranks of the world are
/// here. CommError when the port is taken, nobody listens at the address or a rank does not come
/// within the timeout, when two processes have one rank, or when ranks differ about the world's
/// size.
Meeting meet(const GlooOptions& options);

/// Whether an IP address is of the loopback interface.
bool is_loopback(const std::string& address);

}  // namespace ppfsdp::gloo
