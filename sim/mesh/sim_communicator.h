#pragma once

#include <memory>
#include <string>
#include <vector>

#include "sim/mesh/operation.h"
#include "src/comm/communicator.h"

namespace ppfsdp::sim {

class SimStream;

/// One rank's end of a group of a simulated world.
class SimCommunicator : public comm::Communicator {
 public:
  /// `rank`: in the group.
  SimCommunicator(std::shared_ptr<World> world, GroupPtr group, int rank);

 protected:
  void do_all_gather_into(const at::Tensor& output, const at::Tensor& input,
                          comm::Stream& stream) override;
  at::Tensor do_all_gather(const at::Tensor& input, comm::Stream& stream) override;
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
  int world_rank() const { return ranks()[rank()]; }
  StreamQueue& queue_of(comm::Stream& stream, const char* function) const;
  /// Issues the collective with the present sequence number and returns it.
  std::shared_ptr<Operation> issue(Request request, StreamQueue& queue);
  void issue(Request request, comm::Stream& stream);
  void transfer(Request request, int from, int to, comm::Stream& stream);
  /// Puts the operation on the queue; blocks until it is done on the compute stream.
  void enqueue(const std::shared_ptr<Operation>& operation, int index, StreamQueue& queue);

  std::shared_ptr<World> world_;
  GroupPtr group_;
};

}  // namespace ppfsdp::sim
