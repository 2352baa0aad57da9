#include "backends/gloo/communicator.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "backends/gloo/streams.h"
#include "src/comm/call.h"

namespace ppfsdp::gloo {
namespace {

OperationQueue& queue_of(comm::Stream& stream) {
  auto* queue = dynamic_cast<OperationQueue*>(&stream);
  TORCH_CHECK(queue != nullptr, "stream '", stream.name(),
              "' is not of the Gloo backend; make it with this runtime's create_stream");
  return *queue;
}

}  // namespace

GlooCommunicator::GlooCommunicator(std::shared_ptr<Group> group)
    : Communicator(group->name, group->ranks, group->rank),
      group_(std::move(group)),
      sent_(size(), 0),
      received_(size(), 0) {}

bool GlooCommunicator::checks(uint64_t number) const {
  return number < group_->endpoint->options.checked || number % comm::kComparePeriod == 0;
}

Place GlooCommunicator::here() const {
  return {group_, sequence(), checks(sequence()), std::string(label())};
}

void GlooCommunicator::do_all_gather_into(const at::Tensor& output, const at::Tensor& input,
                                          comm::Stream& stream) {
  queue_of(stream).enqueue(gloo::all_gather_into(here(), output, input));
}

void GlooCommunicator::do_reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                         const comm::ReduceOp& op, comm::Stream& stream) {
  queue_of(stream).enqueue(gloo::reduce_scatter(here(), output, input, op));
}

void GlooCommunicator::do_all_reduce(const at::Tensor& tensor, const comm::ReduceOp& op,
                                     comm::Stream& stream) {
  queue_of(stream).enqueue(gloo::all_reduce(here(), tensor, op));
}

void GlooCommunicator::do_broadcast(const at::Tensor& tensor, int root, comm::Stream& stream) {
  queue_of(stream).enqueue(gloo::broadcast(here(), tensor, root));
}

void GlooCommunicator::do_all_to_all(const at::Tensor& output, const at::Tensor& input,
                                     const std::vector<int64_t>& output_splits,
                                     const std::vector<int64_t>& input_splits,
                                     comm::Stream& stream) {
  TORCH_CHECK(output_splits[rank()] == input_splits[rank()], "all_to_all on group '", name(),
              "': rank ", rank(), " sends itself ", input_splits[rank()], " elements but expects ",
              output_splits[rank()]);
  queue_of(stream).enqueue(gloo::all_to_all(here(), output, input, output_splits, input_splits));
}

void GlooCommunicator::do_send(const at::Tensor& tensor, int peer, comm::Stream& stream) {
  const uint64_t number = sent_[peer]++;
  queue_of(stream).enqueue(gloo::send({group_, number, checks(number), {}}, tensor, peer));
}

void GlooCommunicator::do_recv(const at::Tensor& tensor, int peer, comm::Stream& stream) {
  const uint64_t number = received_[peer]++;
  queue_of(stream).enqueue(gloo::recv({group_, number, checks(number), {}}, tensor, peer));
}

void GlooCommunicator::do_barrier() { group_->endpoint->progress->run(gloo::barrier(here())); }

comm::CommunicatorPtr GlooCommunicator::do_subgroup(const std::vector<int>& members,
                                                    const std::string& name) {
  Place place = here();
  place.label = name;
  group_->endpoint->progress->run(agree_on_subgroup(std::move(place), members));
  auto group = std::make_shared<Group>();
  group->endpoint = group_->endpoint;
  group->name = name;
  for (const int member : members) group->ranks.push_back(group_->ranks[member]);
  group->rank =
      static_cast<int>(std::find(members.begin(), members.end(), rank()) - members.begin());
  // Equal on all members, and on no other group: members of one call have distinct lists, of which
  // the first rank tells them apart.
  group->id = comm::hash({group_->id, sequence(), static_cast<uint64_t>(group->ranks.front())});
  return std::make_shared<GlooCommunicator>(std::move(group));
}

}  // namespace ppfsdp::gloo
