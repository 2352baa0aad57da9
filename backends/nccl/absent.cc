#include <c10/util/Exception.h>

#include "backends/nccl/nccl.h"

namespace ppfsdp::nccl {

std::optional<std::string> why_unavailable() {
  return "this binary was built without CUDA: build it with --config=cuda";
}

std::unique_ptr<comm::Runtime> make_runtime(const NcclOptions&) {
  TORCH_CHECK(false, "nccl: ", *why_unavailable());
}

}  // namespace ppfsdp::nccl
