#include "src/comm/stream.h"

#include <ATen/ops/empty.h>

namespace ppfsdp::comm {

at::Tensor Stream::empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return at::empty(sizes, options);
}

}  // namespace ppfsdp::comm
