#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backends/nccl/operations.h"
#include "backends/nccl/streams.h"
#include "src/comm/communicator.h"

namespace ppfsdp::nccl {

/// A group of ranks by NCCL; see Issuer for what is compared, and when messages are issued.
///
/// Reductions are NCCL's: avg of floating-point values multiplies each rank's value by 1/n before
/// the sum. Which algorithm runs, and so the order of the additions, is NCCL's choice by size and
/// topology; NCCL_ALGO=Ring makes it the ring that comm::ReductionOrder::kNcclRing names. Short,
/// which NCCL lacks, is reduced as Int, which wraps to the same values.
class NcclCommunicator final : public comm::Communicator {
 public:
  /// `control`: where barriers and agreements run.
  NcclCommunicator(std::shared_ptr<Issuer> issuer, std::shared_ptr<NcclStream> control);

  /// The memory that allocate() hands out.
  const BufferPool& buffers() const { return issuer_->buffers(); }

 protected:
  void do_all_gather_into(const at::Tensor& output, const at::Tensor& input,
                          comm::Stream& stream) override;
  at::Tensor do_all_gather(const at::Tensor& input, comm::Stream& stream) override;
  at::Tensor do_allocate(int64_t numel, at::ScalarType dtype, comm::Stream& stream) override;
  void do_reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                         const comm::ReduceOp& op, comm::Stream& stream) override;
  void do_all_reduce(const at::Tensor& tensor, const comm::ReduceOp& op,
                     comm::Stream& stream) override;
  void do_broadcast(const at::Tensor& tensor, int root, comm::Stream& stream) override;
  void do_all_to_all(const at::Tensor& output, const at::Tensor& input,
                     const std::vector<int64_t>& output_splits,
                     const std::vector<int64_t>& input_splits, comm::Stream& stream) override;
  void do_send(const at::Tensor& tensor, int peer, comm::Stream& stream) override;
  void do_recv(const at::Tensor& tensor, int peer, comm::Stream& stream) override;
  void do_barrier() override;
  comm::CommunicatorPtr do_subgroup(const std::vector<int>& members,
                                    const std::string& name) override;

 private:
  /// The next collective, with what the ranks must agree in. `larger`: the larger of its tensors.
  Operation next(comm::Call::Kind kind, const at::Tensor& larger) const;
  /// Runs a reduction of `input` (the same as `output` where it is in place) to `output`.
  void reduce(Operation operation, comm::Stream& stream);

  const std::shared_ptr<Issuer> issuer_;
  const std::shared_ptr<NcclStream> control_;
  at::Tensor token_;
};

}  // namespace ppfsdp::nccl
