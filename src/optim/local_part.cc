#include "src/optim/local_part.h"

#include "src/dtensor/dtensor.h"
#include "src/dtensor/dtensor_impl.h"

namespace ppfsdp::optim {

const at::Tensor& local_part(const at::Tensor& tensor) {
  return dtensor::is_dtensor(tensor) ? dtensor::local_of(tensor) : tensor;
}

void note_write(const at::Tensor& tensor) {
  if (dtensor::is_dtensor(tensor)) {
    static_cast<dtensor::DTensorImpl*>(tensor.unsafeGetTensorImpl())->note_write(/*counted=*/false);
  } else if (!tensor.is_inference()) {
    tensor.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace ppfsdp::optim
