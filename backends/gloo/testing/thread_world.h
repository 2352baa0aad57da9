#pragma once

#include <functional>

#include "backends/gloo/gloo.h"
#include "src/comm/runtime.h"

namespace ppfsdp::gloo::testing {

/// Runs `fn` on `n` ranks, threads of this process that meet at a free port of the loopback
/// interface; throws what the first rank to fail throws. `options`: but for rank, world_size and
/// address.
void run_threads(int n, const GlooOptions& options,
                 const std::function<void(comm::Runtime& runtime)>& fn);

/// A listening socket on a free port of the loopback interface, which goes to `port`.
int listen_on_free_port(int& port);

}  // namespace ppfsdp::gloo::testing
