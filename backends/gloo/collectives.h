#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backends/gloo/exchange.h"
#include "src/comm/reduce_op.h"

namespace ppfsdp::gloo {

/// How an operation stands in its group.
struct Place {
  std::shared_ptr<Group> group;
  /// Of the operation within the group, or of the message between two ranks.
  uint64_t number = 0;
  /// Whether the ranks compare their calls.
  bool checked = false;
  /// What the caller says the operation is for.
  std::string label = {};
};

// The operations of a Communicator (see there for the arguments, which are checked).

OperationPtr all_gather_into(Place place, const at::Tensor& output, const at::Tensor& input);

/// Moves to each rank its slices alone and folds them there as Gloo's ring would fold the whole.
OperationPtr reduce_scatter(Place place, const at::Tensor& output, const at::Tensor& input,
                            const comm::ReduceOp& op);

/// Small tensors, and any between two ranks, go whole to every rank, which folds them: half the
/// delay. Others are reduced by parts of which each rank folds one and gathers the rest.
OperationPtr all_reduce(Place place, const at::Tensor& tensor, const comm::ReduceOp& op);

OperationPtr broadcast(Place place, const at::Tensor& tensor, int root);

OperationPtr all_to_all(Place place, const at::Tensor& output, const at::Tensor& input,
                        const std::vector<int64_t>& output_splits,
                        const std::vector<int64_t>& input_splits);

OperationPtr send(Place place, const at::Tensor& tensor, int peer);
OperationPtr recv(Place place, const at::Tensor& tensor, int peer);

/// Transfers nothing but the calls of all ranks, so it ends when all are here.
OperationPtr barrier(Place place);

/// A barrier that compares the ranks' lists of members and names (the label) of the new group:
/// those who list each other must agree.
OperationPtr agree_on_subgroup(Place place, const std::vector<int>& members);

}  // namespace ppfsdp::gloo
