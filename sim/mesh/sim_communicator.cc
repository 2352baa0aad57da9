#include "sim/mesh/sim_communicator.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "sim/mesh/sim_stream.h"
#include "sim/mesh/world_state.h"

namespace ppfsdp::sim {

using Kind = Request::Kind;

SimCommunicator::SimCommunicator(std::shared_ptr<World> world, GroupPtr group, int rank)
    : comm::Communicator(group->name, group->ranks, rank),
      world_(std::move(world)),
      group_(std::move(group)) {}

StreamQueue& SimCommunicator::queue_of(comm::Stream& stream, const char* function) const {
  world_->check_caller(world_rank(), function);
  auto* sim = dynamic_cast<SimStream*>(&stream);
  TORCH_CHECK(
      sim != nullptr && &sim->world() == world_.get() && sim->queue().rank() == world_rank(),
      function, " on group '", name(), "' (rank ", rank(), " of ", size(), "): stream '",
      stream.name(), "' was not made by this rank's runtime");
  return sim->queue();
}

void SimCommunicator::enqueue(const std::shared_ptr<Operation>& operation, int index,
                              StreamQueue& queue) {
  queue.push_operation(operation, index);
  if (queue.is_compute()) {
    world_->wait_for(world_rank(), operation);
  } else {
    world_->scheduler().point(world_rank(), Point::kCommunication);
  }
}

std::shared_ptr<Operation> SimCommunicator::issue(Request request, StreamQueue& queue) {
  Group& group = *group_;
  const uint64_t at = sequence() - group.first;
  if (at == group.collectives.size()) {
    std::vector<int> members(size());
    std::iota(members.begin(), members.end(), 0);
    group.collectives.push_back(
        std::make_shared<Operation>(*world_, group_, std::move(members),
                                    fmt::format("{} #{}", to_string(request.kind), sequence())));
  }
  const std::shared_ptr<Operation> operation = group.collectives[at];
  operation->issue(rank(), std::move(request), queue);
  // Every member issues in order, so only the oldest can have been issued by all.
  if (operation->all_issued()) {
    group.collectives.pop_front();
    ++group.first;
  }
  enqueue(operation, rank(), queue);
  return operation;
}

void SimCommunicator::issue(Request request, comm::Stream& stream) {
  StreamQueue& queue = queue_of(stream, to_string(request.kind));
  issue(std::move(request), queue);
}

void SimCommunicator::do_all_gather_into(const at::Tensor& output, const at::Tensor& input,
                                         comm::Stream& stream) {
  issue({.kind = Kind::kAllGather, .output = output, .input = input, .label = std::string(label())},
        stream);
}

at::Tensor SimCommunicator::do_all_gather(const at::Tensor& input, comm::Stream& stream) {
  const at::Tensor output = at::empty({0}, input.options());
  output.unsafeGetTensorImpl()->set_sizes_contiguous({size() * input.numel()});
  world_->put_poison_under(*output.storage().unsafeGetStorageImpl(), output.nbytes());
  issue({.kind = Kind::kAllGather,
         .output = output,
         .input = input,
         .shares_output = true,
         .label = std::string(label())},
        stream);
  return output;
}

void SimCommunicator::do_reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                        const comm::ReduceOp& op, comm::Stream& stream) {
  issue({.kind = Kind::kReduceScatter,
         .output = output,
         .input = input,
         .op = op,
         .label = std::string(label())},
        stream);
}

void SimCommunicator::do_all_reduce(const at::Tensor& tensor, const comm::ReduceOp& op,
                                    comm::Stream& stream) {
  issue({.kind = Kind::kAllReduce,
         .output = tensor,
         .input = tensor,
         .op = op,
         .label = std::string(label())},
        stream);
}

void SimCommunicator::do_broadcast(const at::Tensor& tensor, int root, comm::Stream& stream) {
  issue({.kind = Kind::kBroadcast,
         .output = tensor,
         .input = rank() == root ? tensor : at::Tensor(),
         .root = root},
        stream);
}

void SimCommunicator::do_all_to_all(const at::Tensor& output, const at::Tensor& input,
                                    const std::vector<int64_t>& output_splits,
                                    const std::vector<int64_t>& input_splits,
                                    comm::Stream& stream) {
  issue({.kind = Kind::kAllToAll,
         .output = output,
         .input = input,
         .output_splits = output_splits,
         .input_splits = input_splits},
        stream);
}

void SimCommunicator::transfer(Request request, int from, int to, comm::Stream& stream) {
  const int index = rank() == from ? 0 : 1;
  StreamQueue& queue = queue_of(stream, to_string(request.kind));
  Group::Channel& channel = group_->channels[{from, to}];
  uint64_t& mine = index == 0 ? channel.sends : channel.receives;
  const uint64_t theirs = index == 0 ? channel.receives : channel.sends;
  // The side that is ahead has left its operations for the other.
  if (mine >= theirs) {
    channel.unmatched.push_back(std::make_shared<Operation>(
        *world_, group_, std::vector<int>{from, to},
        fmt::format("send #{} from rank {} to rank {}", mine, from, to)));
  }
  const std::shared_ptr<Operation> operation =
      mine >= theirs ? channel.unmatched.back() : channel.unmatched.front();
  operation->issue(index, std::move(request), queue);
  if (operation->all_issued()) channel.unmatched.pop_front();
  ++mine;
  enqueue(operation, index, queue);
}

void SimCommunicator::do_send(const at::Tensor& tensor, int peer, comm::Stream& stream) {
  transfer({.kind = Kind::kSend, .input = tensor}, rank(), peer, stream);
}

void SimCommunicator::do_recv(const at::Tensor& tensor, int peer, comm::Stream& stream) {
  transfer({.kind = Kind::kRecv, .output = tensor}, peer, rank(), stream);
}

void SimCommunicator::do_barrier() {
  world_->check_caller(world_rank(), "barrier");
  issue({.kind = Kind::kBarrier}, world_->compute_queue(world_rank()));
}

comm::CommunicatorPtr SimCommunicator::do_subgroup(const std::vector<int>& members,
                                                   const std::string& name) {
  world_->check_caller(world_rank(), "subgroup");
  const std::shared_ptr<Operation> operation =
      issue({.kind = Kind::kSubgroup, .members = members, .name = name},
            world_->compute_queue(world_rank()));
  // Not done only when the world ends and this rank unwinds.
  if (!operation->done()) throw RankEnded();
  const auto mine = std::lower_bound(members.begin(), members.end(), rank());
  return std::make_shared<SimCommunicator>(world_, operation->new_group(rank()),
                                           static_cast<int>(mine - members.begin()));
}

}  // namespace ppfsdp::sim
