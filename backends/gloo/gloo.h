#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "src/comm/runtime.h"

namespace ppfsdp::gloo {

/// Where and as whom to meet the other ranks.
struct GlooOptions {
  int rank = 0;
  int world_size = 1;
  std::string master_addr = "127.0.0.1";
  int master_port = 29500;
  /// For the rendezvous and for every collective.
  std::chrono::milliseconds timeout{std::chrono::minutes(5)};
  /// Collectives whose sizes are compared between ranks before they run: the first `checked` of each
  /// group, then one in 64. (A mismatch inside Gloo aborts the process.)
  uint64_t checked = 256;

  /// From RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, as torchrun sets them; an error names the
  /// variable that is missing or wrong.
  static GlooOptions from_environment();
};

/// Joins the world: every rank calls it, and blocks until all have (CommError after the timeout,
/// which names the address and says how many came).
std::unique_ptr<comm::Runtime> make_runtime(const GlooOptions& options);

}  // namespace ppfsdp::gloo
