#include "src/comm/single_runtime.h"

#include <c10/util/Exception.h>

#include <cstring>
#include <string>
#include <vector>

#include "src/comm/communicator.h"
#include "src/comm/eager_stream.h"

namespace ppfsdp::comm {
namespace {

class SingleCommunicator : public Communicator {
 public:
  SingleCommunicator(std::string name, c10::Device device)
      : Communicator(std::move(name), {0}, 0, device) {}

 protected:
  void do_all_gather_into(const at::Tensor& output, const at::Tensor& input,
                          Stream& stream) override {
    copy(output, input, stream);
  }

  void do_reduce_scatter(const at::Tensor& output, const at::Tensor& input, const ReduceOp& op,
                         Stream& stream) override {
    reduce(output, input, op, stream);
  }

  void do_all_reduce(const at::Tensor& tensor, const ReduceOp& op, Stream& stream) override {
    reduce(tensor, tensor, op, stream);
  }

  void do_broadcast(const at::Tensor&, int, Stream&) override {}

  void do_all_to_all(const at::Tensor& output, const at::Tensor& input, const std::vector<int64_t>&,
                     const std::vector<int64_t>&, Stream& stream) override {
    TORCH_CHECK(output.numel() == input.numel(), "all_to_all on group '", name(),
                "' of one rank: output has ", output.numel(), " elements and input ",
                input.numel());
    copy(output, input, stream);
  }

  // The base class refuses this rank as its own peer, and there is no other.
  void do_send(const at::Tensor&, int, Stream&) override { TORCH_INTERNAL_ASSERT(false); }
  void do_recv(const at::Tensor&, int, Stream&) override { TORCH_INTERNAL_ASSERT(false); }

  void do_barrier() override {}

  CommunicatorPtr do_subgroup(const std::vector<int>&, const std::string& name) override {
    return std::make_shared<SingleCommunicator>(name, device());
  }

 private:
  void copy(const at::Tensor& output, const at::Tensor& input, Stream& stream) {
    stream.run([output, input] {
      // Null on meta; equal in place.
      void* to = output.mutable_data_ptr();
      const void* from = input.const_data_ptr();
      if (to != from && input.numel() != 0) std::memcpy(to, from, input.nbytes());
    });
  }

  void reduce(const at::Tensor& output, const at::Tensor& input, const ReduceOp& op,
              Stream& stream) {
    // Of one value, every other reduction is that value.
    if (op.kind != ReduceOp::Kind::kPremulSum) return copy(output, input, stream);
    if (device().is_meta()) return;
    stream.run([output, input, op] {
      reduce_range(ReductionOrder::kRankOrder, op, {input}, 0, input.numel(), output);
    });
  }
};

class SingleRuntime : public Runtime {
 public:
  explicit SingleRuntime(c10::Device device)
      : device_(device),
        world_(std::make_shared<SingleCommunicator>("world", device)),
        compute_("compute") {}

  int rank() const override { return 0; }
  int world_size() const override { return 1; }
  c10::Device device() const override { return device_; }
  std::string backend() const override { return "single"; }
  ReductionOrder reduction_order() const override { return ReductionOrder::kRankOrder; }
  const CommunicatorPtr& world() override { return world_; }
  Stream& compute_stream() override { return compute_; }
  std::shared_ptr<Stream> create_stream(const std::string& name, StreamPriority) override {
    return std::make_shared<EagerStream>(name);
  }

 private:
  c10::Device device_;
  CommunicatorPtr world_;
  EagerStream compute_;
};

}  // namespace

std::unique_ptr<Runtime> make_single_runtime(c10::Device device) {
  TORCH_CHECK(device.is_cpu() || device.is_meta(),
              "make_single_runtime: device must be cpu or meta, got ", device);
  return std::make_unique<SingleRuntime>(device);
}

}  // namespace ppfsdp::comm
