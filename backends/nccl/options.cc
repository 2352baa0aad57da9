#include <c10/util/Exception.h>

#include <optional>

#include "backends/nccl/nccl.h"
#include "backends/start/launcher.h"

namespace ppfsdp::nccl {

NcclOptions NcclOptions::from_environment() {
  const std::optional<start::Launched> launched =
      start::read_launcher(start::process_environment());
  TORCH_CHECK(launched,
              "environment variable WORLD_SIZE is not set; it is the number of ranks, as "
              "torchrun sets it");
  NcclOptions options;
  options.take(*launched);
  options.local_rank = launched->local_rank;
  return options;
}

}  // namespace ppfsdp::nccl
