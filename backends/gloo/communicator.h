#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backends/gloo/collectives.h"
#include "backends/gloo/group.h"
#include "src/comm/communicator.h"

namespace ppfsdp::gloo {

/// Puts operations on streams of this backend.
class GlooCommunicator final : public comm::Communicator {
 public:
  explicit GlooCommunicator(std::shared_ptr<Group> group);

 protected:
  void do_all_gather_into(const at::Tensor& output, const at::Tensor& input,
                          comm::Stream& stream) override;
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
  bool checks(uint64_t number) const;
  /// The next collective's place.
  Place here() const;

  const std::shared_ptr<Group> group_;
  /// Messages so far to and from each rank.
  std::vector<uint64_t> sent_;
  std::vector<uint64_t> received_;
};

}  // namespace ppfsdp::gloo
