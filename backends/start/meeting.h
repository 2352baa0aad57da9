#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace ppfsdp::start {

/// Where and as whom to meet the other ranks.
struct MeetingOptions {
  int rank = 0;
  int world_size = 1;
  std::string master_addr = "127.0.0.1";
  int master_port = 29500;
  std::chrono::milliseconds timeout{std::chrono::minutes(5)};
  /// Rank 0 only: a listening socket on master_port to take over, so that whoever picks a free port
  /// keeps it; -1: rank 0 opens it.
  int listen_fd = -1;
};

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
Meeting meet(const MeetingOptions& options);

/// Whether an IP address is of the loopback interface.
bool is_loopback(const std::string& address);

}  // namespace ppfsdp::start
