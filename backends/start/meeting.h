#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "backends/start/agreement.h"
#include "backends/start/launcher.h"

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
  /// Whether somebody else already serves a c10d store at the address, so that rank 0 does not.
  bool store_served = false;
  /// Ranks of another attempt in such a store do not meet this one's.
  int attempt = 0;
  /// What must be equal on all ranks, most telling first.
  std::vector<Fact> facts;

  /// Takes rank, world and address from what the launcher said.
  void take(const Launched& launched);
  /// c10::Error, led by the backend's name, for values that no world has.
  void check(const char* backend) const;
};

/// The store that all ranks share once they have met.
struct Meeting {
  /// Keys are this attempt's own.
  c10::intrusive_ptr<c10d::Store> store;
  /// This process's IP address, as the other ranks reach it: loopback when all are on one machine.
  std::string address;
};

/// Rank 0 opens master_port and the others come to it. Returns when all ranks of the world are here
/// and agree in `facts`.
///
/// CommError, one line, when the port is taken, nobody (or somebody else's program) listens at the
/// address, or the world is found to be at fault, which then all ranks hear that have come: a rank
/// does not come within the timeout of the first to wait (the text names those missing), two
/// processes have one rank, ranks were told different world sizes, or a fact differs (the text has
/// its name, its values and the ranks that have each). Rank 0 stays until the others have heard, at
/// most two seconds.
///
/// A rank makes a fixed number of calls to the store. The last to come compares all ranks' hashes
/// of the facts (8 bytes each, in one call) and fetches values only where they differ.
Meeting meet(const MeetingOptions& options);

}  // namespace ppfsdp::start
