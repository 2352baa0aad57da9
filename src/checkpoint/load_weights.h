#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "src/comm/runtime.h"
#include "src/nn/module.h"

namespace ppfsdp::checkpoint {

enum class WeightsReader {
  /// Every rank reads its part of each tensor, from a file system that all ranks see.
  kEveryRank,
  /// Rank 0 reads, and sends each rank its part. The other ranks never open a file.
  kRankZero,
};

struct LoadOptions {
  WeightsReader reader = WeightsReader::kEveryRank;
  /// Whether a tensor that only the model or only the file has is an error.
  bool strict = true;
};

/// The same on every rank.
struct LoadReport {
  std::vector<std::string> missing;    ///< in the model alone: these kept their values
  std::vector<std::string> unknown;    ///< in the file alone: these were passed over
  std::vector<std::string> converted;  ///< "name: Half to Float"
};

/// Loads full weights into `model`, sharded or not: its parameters and persistent buffers, by their
/// names, from `path` (what WeightFiles takes). Every rank of `runtime`'s world calls it with a
/// model of the same structure that has memory (nn::to_empty). A DTensor's part is read, or sent,
/// part by part: beside the model a rank holds at most one parameter's part, rank 0 as reader of
/// all too.
///
/// A tied parameter may stand in the file under any of its names; under several it must have the
/// same values. Floating-point dtypes are converted to the model's; other dtypes must be equal.
///
/// Faults are c10::Error on every rank, whichever rank met them: what WeightFiles refuses; a shape
/// or dtype that differs, a missing or (by `strict`) unknown tensor, a parameter on meta, all of
/// which are found, and named together, before anything is read; and a file that cannot be read
/// further, after which the model's values are not to be used.
LoadReport load_weights(nn::Module& model, const std::filesystem::path& path,
                        comm::Runtime& runtime, const LoadOptions& options = {});

}  // namespace ppfsdp::checkpoint
