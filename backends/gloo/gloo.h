#pragma once

#include <cstdint>
#include <memory>

#include "backends/start/meeting.h"
#include "src/comm/runtime.h"

namespace ppfsdp::gloo {

/// `timeout` is for the rendezvous and for every operation.
struct GlooOptions : start::MeetingOptions {
  /// Collectives whose calls the ranks compare with each other: the first `checked` of each group
  /// (and messages of each pair of ranks), then one in 64. Of these a mismatch is an error at once,
  /// on every rank, that says which rank differs; of the others it is a timeout. Nothing is
  /// transferred between calls that do not match, checked or not.
  uint64_t checked = 256;
  /// From the variables of the launcher that started this process (see start::read_launcher); an
  /// error names the variable that is missing or wrong, and what would be right.
  static GlooOptions from_environment();
};

/// Joins the world: every rank calls it, and blocks until all have (CommError after the timeout,
/// which names the address and says how many came). A world of one needs no address.
///
/// The connections use the network interface named by GLOO_SOCKET_IFNAME, else the loopback
/// interface when all ranks are on one machine that master_addr names so, else the interface by
/// which this machine reaches rank 0's.
///
/// The compute stream runs everything at once, on the calling thread, and its collectives block.
/// On other streams a collective's transfers start as soon as nothing before it is pending and go
/// on in the background; closures behind it, and its own fold, run on the rank's thread when it
/// waits for an event or a stream. Of a failed operation the error is thrown at that wait; after it
/// every operation of this rank fails at once. The destructor lets the other ranks receive what is
/// under way, so it may wait for them, at most two seconds.
std::unique_ptr<comm::Runtime> make_runtime(const GlooOptions& options);

}  // namespace ppfsdp::gloo
