#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>

#include "src/train/config.h"
#include "src/train/sampler.h"
#include "src/train/token_data.h"

namespace ppfsdp::train {

/// int64 [rows, seq_len] each; labels[i][j] is the token that follows tokens[i][j].
struct Batch {
  at::Tensor tokens;
  at::Tensor labels;
};

/// Rows [first, first + count) of a step's global batch.
struct RowRange {
  int64_t first = 0;
  int64_t count = 0;
  bool operator==(const RowRange&) const = default;
};

/// The rows of one rank's microbatch: rank r of w takes the r-th of w equal runs of rows, and its
/// m-th microbatch the m-th part of that run. Throws ConfigError unless world x microbatches
/// divides global_batch.
RowRange rank_rows(const TrainingConfig& training, int world_size, int rank, int64_t microbatch);

/// The training data as batches; one for all ranks of a process, safe to use from several threads.
class DataLoader {
 public:
  /// Opens the files that `config.data` names. Token ids must be below `vocab`. Throws ConfigError.
  DataLoader(const Config& config, int64_t vocab);

  /// Rows of the global batch of step 0, 1, ... To a GPU they go by one copy from pinned memory,
  /// for which the host does not wait.
  Batch batch(int64_t step, const RowRange& rows, c10::Device device = c10::kCPU) const;

  const TokenData& data() const { return data_; }
  /// Sequences in an epoch.
  int64_t windows() const { return sampler_.windows(); }

 private:
  int64_t seq_len_;
  int64_t global_batch_;
  int64_t vocab_;
  TokenData data_;
  Sampler sampler_;
};

}  // namespace ppfsdp::train
