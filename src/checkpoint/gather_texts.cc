#include "src/checkpoint/gather_texts.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>

namespace ppfsdp::checkpoint {
namespace {

/// Every rank's `mine`, a row each, on the CPU.
at::Tensor gather(comm::Runtime& runtime, const at::Tensor& mine) {
  const at::Tensor input = mine.to(runtime.device());
  const at::Tensor all = at::empty({runtime.world_size(), mine.numel()}, input.options());
  comm::Stream& stream = runtime.compute_stream();
  runtime.world()->all_gather_into(all, input, stream);
  stream.synchronize();
  return all.to(at::kCPU);
}

}  // namespace

std::vector<std::string> gather_texts(comm::Runtime& runtime, const std::string& text) {
  const auto length = static_cast<int64_t>(text.size());
  const at::Tensor lengths = gather(runtime, at::full({1}, length, at::kLong));
  const auto* length_of = lengths.const_data_ptr<int64_t>();
  const int64_t longest = *std::max_element(length_of, length_of + runtime.world_size());
  std::vector<std::string> texts(runtime.world_size());
  if (longest == 0) return texts;
  const at::Tensor mine = at::zeros({longest}, at::kByte);
  if (length > 0) std::memcpy(mine.mutable_data_ptr(), text.data(), text.size());
  const at::Tensor all = gather(runtime, mine);
  const auto* bytes = static_cast<const char*>(all.const_data_ptr());
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    texts[rank].assign(bytes + rank * longest, length_of[rank]);
  }
  return texts;
}

void agree_on_faults(comm::Runtime& runtime, const std::string& fault) {
  const std::vector<std::string> texts = gather_texts(runtime, fault);
  const auto first = std::ranges::find_if(texts, [](const auto& text) { return !text.empty(); });
  if (first == texts.end()) return;
  const bool all_alike =
      std::ranges::all_of(texts, [&](const auto& text) { return text == *first; });
  TORCH_CHECK(false, all_alike ? "" : c10::str("on rank ", first - texts.begin(), ": "), *first);
}

}  // namespace ppfsdp::checkpoint
