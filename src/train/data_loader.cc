#include "src/train/data_loader.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "src/train/config_error.h"

namespace ppfsdp::train {
namespace {

TokenData open_data(const DataConfig& data) {
  if (data.kind == "text") {
    return TokenData(data.files.empty() ? std::vector{libtorch_headers_glob()} : data.files,
                     TokenType::kByte);
  }
  if (data.files.empty()) {
    throw ConfigError("data.files: data.kind = \"tokens\" has no default files; name some");
  }
  return TokenData(data.files, data.dtype == "uint16" ? TokenType::kUint16 : TokenType::kUint32);
}

}  // namespace

RowRange rank_rows(const TrainingConfig& training, int world_size, int rank, int64_t microbatch) {
  const int64_t parts = world_size * training.microbatches;
  if (training.global_batch % parts != 0) {
    throw ConfigError(fmt::format(
        "training.global_batch = {} is not divisible by {} ranks x {} microbatches; the nearest "
        "that is: {}",
        training.global_batch, world_size, training.microbatches,
        std::max(parts, (training.global_batch + parts / 2) / parts * parts)));
  }
  const int64_t count = training.global_batch / parts;
  return {(rank * training.microbatches + microbatch) * count, count};
}

DataLoader::DataLoader(const Config& config, int64_t vocab)
    : seq_len_(config.data.seq_len),
      global_batch_(config.training.global_batch),
      vocab_(vocab),
      data_(open_data(config.data)),
      sampler_(data_.size(), seq_len_, static_cast<uint64_t>(config.training.seed)) {}

Batch DataLoader::batch(int64_t step, const RowRange& rows, c10::Device device) const {
  // Beside each other, so that one copy takes them to the device.
  const at::Tensor both = at::empty({2, rows.count, seq_len_},
                                    at::TensorOptions(at::kLong).pinned_memory(device.is_cuda()));
  int64_t* tokens = both.mutable_data_ptr<int64_t>();
  int64_t* labels = tokens + rows.count * seq_len_;
  std::vector<int64_t> window(static_cast<size_t>(seq_len_) + 1);
  for (int64_t row = 0; row < rows.count; ++row) {
    const int64_t offset = sampler_.offset(step * global_batch_ + rows.first + row);
    data_.read(offset, seq_len_ + 1, vocab_, window.data());
    std::copy(window.begin(), window.end() - 1, tokens + row * seq_len_);
    std::copy(window.begin() + 1, window.end(), labels + row * seq_len_);
  }
  const at::Tensor there = both.to(device, /*non_blocking=*/true);
  return {there[0], there[1]};
}

}  // namespace ppfsdp::train
