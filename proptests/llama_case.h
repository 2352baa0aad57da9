#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "sim/mesh/world.h"
#include "src/comm/reduction.h"
#include "src/fsdp/fully_shard.h"
#include "src/nn/llama_config.h"

namespace ppfsdp::proptests {

/// One training run of a small Llama, drawn whole: nothing else decides its outcome.
struct LlamaCase {
  int world = 2;
  nn::LlamaConfig model;
  int64_t batch = 1;  ///< sequences of one rank's microbatch
  int64_t seq = 4;
  int steps = 2;
  int microbatches = 1;
  fsdp::ReshardAfterForward reshard;
  fsdp::MixedPrecisionPolicy policy;
  bool adamw = true;
  double max_norm = 0.5;
  double norm_type = 2;
  /// Gathers and reduce-scatters use memory that the communicator makes.
  bool group_memory = false;
  std::string frozen;  ///< parameters whose name contains this do not require grad; "" none
  uint64_t seed = 0;   ///< initial values and tokens
  sim::WorldOptions mesh;

  /// On one line, every field.
  std::string str() const;
};

/// What a run gives, with the names in the order of `parameters`.
struct LlamaResult {
  std::vector<std::string> names;
  std::vector<std::vector<double>> losses;          ///< [step][microbatch], of one rank
  std::vector<double> norms;                        ///< a step, before clipping
  std::vector<std::vector<at::Tensor>> grads;       ///< [step][parameter], full, after clipping
  std::vector<std::vector<at::Tensor>> parameters;  ///< [step][parameter], full
};

/// By fully_shard on `runtime`, whose world is c.world.
LlamaResult train_sharded(const LlamaCase& c, comm::Runtime& runtime);

/// By ReferenceTrainer in one process. losses are rank `r`'s in result[r]; the rest is alike.
std::vector<LlamaResult> train_reference(const LlamaCase& c);

/// The first difference in bits, as "step 1 grad layers.0.attention.wq.weight: 3 of 12 elements,
/// the first at 5: 0.1 is not 0.2"; empty when there is none.
std::string first_difference(const LlamaResult& got, const LlamaResult& want);

}  // namespace ppfsdp::proptests
