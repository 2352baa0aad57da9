#include "src/optim/neighbours.h"

#include <cstddef>

namespace ppfsdp::optim {

bool follows(const at::Tensor& tensor, const at::Tensor& next) {
  return tensor.scalar_type() == next.scalar_type() &&
         next.storage_offset() == tensor.storage_offset() + tensor.numel() &&
         tensor.is_contiguous() && next.is_contiguous() &&
         tensor.storage().is_alias_of(next.storage());
}

at::Tensor flat_from(const at::Tensor& tensor, int64_t numel) {
  return tensor.as_strided({numel}, {1}, tensor.storage_offset());
}

std::vector<at::Tensor> join_neighbours(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> joined;
  for (size_t begin = 0; begin < tensors.size();) {
    size_t end = begin + 1;
    int64_t numel = tensors[begin].numel();
    for (; end < tensors.size() && follows(tensors[end - 1], tensors[end]); ++end) {
      numel += tensors[end].numel();
    }
    joined.push_back(end == begin + 1 ? tensors[begin] : flat_from(tensors[begin], numel));
    begin = end;
  }
  return joined;
}

}  // namespace ppfsdp::optim
