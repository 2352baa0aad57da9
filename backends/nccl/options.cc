#include "backends/nccl/nccl.h"
#include "backends/start/launcher.h"

namespace ppfsdp::nccl {

NcclOptions NcclOptions::from_environment() {
  const start::Launched launched = start::read_own_launcher();
  NcclOptions options;
  options.take(launched);
  options.local_rank = launched.local_rank;
  return options;
}

}  // namespace ppfsdp::nccl
