#include "backends/nccl/gpu/loopback.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

namespace ppfsdp::nccl::testing {
namespace {

class LoopbackCommunicator : public comm::Communicator {
 public:
  LoopbackCommunicator(const std::string& name, std::vector<int> ranks, int rank,
                       comm::Runtime& own)
      : Communicator(name, std::move(ranks), rank, own.device()), own_(own) {}

 protected:
  at::Tensor do_allocate(int64_t numel, at::ScalarType dtype, comm::Stream& stream) override {
    return own_.world()->allocate(numel, dtype, stream);
  }
  at::Tensor do_all_gather(const at::Tensor& input, comm::Stream& stream) override {
    const at::Tensor output = stream.empty({size() * input.numel()}, input.options());
    do_all_gather_into(output, input, stream);
    return output;
  }
  void do_all_gather_into(const at::Tensor& output, const at::Tensor& input,
                          comm::Stream& stream) override {
    stream.run([all = output.view({-1}), mine = input.view({-1}), size = size()] {
      for (int rank = 0; rank < size; ++rank) {
        const at::Tensor slot = all.narrow(0, rank * mine.numel(), mine.numel());
        if (slot.const_data_ptr() != mine.const_data_ptr()) slot.copy_(mine);
      }
    });
    keep(output, stream);
    keep(input, stream);
  }
  void do_reduce_scatter(const at::Tensor& output, const at::Tensor& input, const comm::ReduceOp&,
                         comm::Stream& stream) override {
    const int64_t numel = output.numel();
    const at::Tensor part = input.view({-1}).narrow(0, rank() * numel, numel);
    stream.run([mine = output.view({-1}), part] {
      if (mine.const_data_ptr() != part.const_data_ptr()) mine.copy_(part);
    });
    keep(output, stream);
    keep(input, stream);
  }
  void do_all_reduce(const at::Tensor& tensor, const comm::ReduceOp& op,
                     comm::Stream& stream) override {
    if (op.kind == comm::ReduceOp::Kind::kSum) {
      stream.run([tensor, size = size()] { tensor.mul_(size); });
    }
    keep(tensor, stream);
  }
  void do_broadcast(const at::Tensor&, int, comm::Stream&) override { refuse("broadcast"); }
  void do_all_to_all(const at::Tensor&, const at::Tensor&, const std::vector<int64_t>&,
                     const std::vector<int64_t>&, comm::Stream&) override {
    refuse("all_to_all");
  }
  void do_send(const at::Tensor&, int, comm::Stream&) override { refuse("send"); }
  void do_recv(const at::Tensor&, int, comm::Stream&) override { refuse("recv"); }
  void do_barrier() override {}
  comm::CommunicatorPtr do_subgroup(const std::vector<int>& members,
                                    const std::string& name) override {
    std::vector<int> world_ranks;
    for (const int member : members) world_ranks.push_back(ranks()[member]);
    const auto mine = std::ranges::find(members, rank());
    return std::make_shared<LoopbackCommunicator>(name, std::move(world_ranks),
                                                  static_cast<int>(mine - members.begin()), own_);
  }

 private:
  /// A broadcast in a world of one moves nothing; the backend keeps the tensor alive as it keeps
  /// those of any operation.
  void keep(const at::Tensor& tensor, comm::Stream& stream) {
    own_.world()->broadcast(tensor, /*root=*/0, stream);
  }
  static void refuse(const char* operation) {
    TORCH_CHECK(false, "Loopback: ", operation, " has no meaning among copies of one rank");
  }

  comm::Runtime& own_;
};

std::vector<int> all_ranks(int size) {
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

Loopback::Loopback(comm::Runtime& own, int rank, int world_size)
    : own_(own),
      world_(std::make_shared<LoopbackCommunicator>("world", all_ranks(world_size), rank, own)) {
  TORCH_CHECK(own.world_size() == 1, "Loopback: its own world must be of one rank, is of ",
              own.world_size());
}

}  // namespace ppfsdp::nccl::testing
