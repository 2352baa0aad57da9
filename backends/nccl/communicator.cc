#include "backends/nccl/communicator.h"

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "backends/nccl/types.h"

namespace ppfsdp::nccl {

using comm::Call;

NcclCommunicator::NcclCommunicator(std::shared_ptr<Issuer> issuer,
                                   std::shared_ptr<NcclStream> control)
    : Communicator(issuer->group().name, issuer->group().ranks, issuer->group().index,
                   issuer->endpoint().settings.tensors),
      issuer_(std::move(issuer)),
      control_(std::move(control)) {
  control_->run([&] { token_ = at::zeros({1}, at::TensorOptions(at::kInt).device(device())); });
}

Operation NcclCommunicator::next(Call::Kind kind, const at::Tensor& larger) const {
  Operation operation;
  operation.what.group = issuer_->group_ptr();
  operation.what.number = sequence();
  Call& call = operation.what.call;
  call.kind = kind;
  call.dtype = larger.scalar_type();
  call.count = larger.numel();
  call.label = label();
  return operation;
}

void NcclCommunicator::do_all_gather_into(const at::Tensor& output, const at::Tensor& input,
                                          comm::Stream& stream) {
  Operation operation = next(Call::Kind::kAllGatherInto, output);
  operation.output = output;
  operation.input = input;
  issuer_->collective(std::move(operation), as_nccl(stream));
}

at::Tensor NcclCommunicator::do_all_gather(const at::Tensor& input, comm::Stream& stream) {
  const at::Tensor output = stream.empty({size() * input.numel()}, input.options());
  do_all_gather_into(output, input, stream);
  return output;
}

at::Tensor NcclCommunicator::do_allocate(int64_t numel, at::ScalarType dtype,
                                         comm::Stream& stream) {
  issuer_->endpoint().check_alive();
  if (numel > 0) {
    at::Tensor tensor = issuer_->buffers().allocate(numel, dtype, as_nccl(stream)->stream());
    if (tensor.defined()) return tensor;
  }
  return stream.empty({numel}, at::TensorOptions(dtype).device(device()));
}

void NcclCommunicator::reduce(Operation operation, comm::Stream& stream) {
  const std::shared_ptr<NcclStream> mine = as_nccl(stream);
  if (reduced_as(operation.what.call.dtype)) {
    return issuer_->collective(std::move(operation), mine);
  }
  // Short: the low half of an Int's sum, minimum or maximum is the Short's.
  TORCH_INTERNAL_ASSERT(operation.what.call.dtype == at::kShort);
  const at::Tensor output = operation.output;
  mine->run([&] {
    if (operation.input.defined()) operation.input = operation.input.to(at::kInt);
    operation.output = operation.input.defined()
                           ? stream.empty(output.sizes(), operation.input.options())
                           : output.to(at::kInt);
  });
  const at::Tensor wide = operation.output;
  operation.what.call.dtype = at::kInt;
  issuer_->collective(std::move(operation), mine);
  mine->run([&] { output.copy_(wide); });
}

void NcclCommunicator::do_reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                         const comm::ReduceOp& op, comm::Stream& stream) {
  Operation operation = next(Call::Kind::kReduceScatter, input);
  operation.what.call.op = op;
  operation.output = output;
  operation.input = input;
  reduce(std::move(operation), stream);
}

void NcclCommunicator::do_all_reduce(const at::Tensor& tensor, const comm::ReduceOp& op,
                                     comm::Stream& stream) {
  Operation operation = next(Call::Kind::kAllReduce, tensor);
  operation.what.call.op = op;
  operation.output = tensor;
  reduce(std::move(operation), stream);
}

void NcclCommunicator::do_broadcast(const at::Tensor& tensor, int root, comm::Stream& stream) {
  Operation operation = next(Call::Kind::kBroadcast, tensor);
  operation.what.call.root = root;
  operation.output = tensor;
  issuer_->collective(std::move(operation), as_nccl(stream));
}

void NcclCommunicator::do_all_to_all(const at::Tensor& output, const at::Tensor& input,
                                     const std::vector<int64_t>& output_splits,
                                     const std::vector<int64_t>& input_splits,
                                     comm::Stream& stream) {
  TORCH_CHECK(output_splits[rank()] == input_splits[rank()], "all_to_all on group '", name(),
              "': rank ", rank(), " sends itself ", input_splits[rank()], " elements but expects ",
              output_splits[rank()]);
  Operation operation = next(Call::Kind::kAllToAll, input);
  // Ranks may send different numbers of elements.
  operation.what.call.count = 0;
  operation.what.call.sends = input_splits;
  operation.what.call.receives = output_splits;
  operation.output = output;
  operation.input = input;
  issuer_->collective(std::move(operation), as_nccl(stream));
}

void NcclCommunicator::do_send(const at::Tensor& tensor, int peer, comm::Stream& stream) {
  issuer_->message(tensor, peer, /*sends=*/true, as_nccl(stream));
}

void NcclCommunicator::do_recv(const at::Tensor& tensor, int peer, comm::Stream& stream) {
  issuer_->message(tensor, peer, /*sends=*/false, as_nccl(stream));
}

void NcclCommunicator::do_barrier() {
  Operation operation = next(Call::Kind::kBarrier, token_);
  operation.output = token_;
  issuer_->collective(std::move(operation), control_);
  control_->synchronize();
}

comm::CommunicatorPtr NcclCommunicator::do_subgroup(const std::vector<int>& members,
                                                    const std::string& name) {
  What what{issuer_->group_ptr(), sequence(), {}};
  what.call.kind = Call::Kind::kSubgroup;
  what.call.label = name;
  what.call.sends.assign(size(), 0);
  for (const int member : members) what.call.sends[member] = 1;
  if (size() > 1) issuer_->agree(what, *control_);

  auto group = std::make_shared<Group>();
  group->name = name;
  // Members of one call have distinct lists, of which the first rank tells them apart.
  group->key = fmt::format("{}/{}.{}", issuer_->group().key, sequence(), members.front());
  for (const int member : members) group->ranks.push_back(ranks()[member]);
  group->index =
      static_cast<int>(std::find(members.begin(), members.end(), rank()) - members.begin());
  auto handle = issuer_->handle().split(group, members.front(), what);
  const std::shared_ptr<Endpoint>& endpoint = issuer_->endpoint_ptr();
  auto issuer = std::make_shared<Issuer>(endpoint, std::move(group), std::move(handle));
  endpoint->add(issuer);
  return std::make_shared<NcclCommunicator>(std::move(issuer), control_);
}

}  // namespace ppfsdp::nccl
