#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "src/comm/reduction.h"
#include "src/comm/runtime.h"
#include "src/train/config.h"
#include "src/train/data_loader.h"
#include "src/train/expectation.h"
#include "src/train/trainer.h"

namespace ppfsdp::train {

enum class VerifyMode {
  kExact,      ///< make_exact_expectation
  kTolerance,  ///< make_tolerance_expectation
};

/// What to tell a user who wants ranks on `device` verified by the reference, which runs on the
/// CPU; empty if it can be. A GPU adds in another order, and what it draws to begin with are other
/// values.
std::string refuse_verify(const Config& config, VerifyMode mode, c10::Device device);

/// Trains a config sharded and, on rank 0, on one device beside it, and compares each step.
class Verifier {
 public:
  /// Every rank of the world makes one. Throws ConfigError for what refuse_verify refuses. `order`:
  /// how the reference folds; by default as `runtime` does, and anything else must be found out.
  /// The others outlive it.
  Verifier(const Config& config, const DataLoader& data, comm::Runtime& runtime, VerifyMode mode,
           std::optional<comm::ReductionOrder> order = std::nullopt);

  /// The next step, on every rank; the verdict is rank 0's, empty on others.
  std::optional<StepVerdict> step();

  Trainer& trainer() { return trainer_; }

 private:
  comm::Runtime& runtime_;
  Trainer trainer_;
  std::unique_ptr<Expectation> expectation_;
  int64_t next_step_ = 0;
};

}  // namespace ppfsdp::train
