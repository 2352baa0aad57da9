#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <string>

#include "src/comm/runtime.h"

namespace ppfsdp::nccl::testing {

/// One rank of a world whose other ranks are thought to be copies of it, on one device: streams,
/// events and memory are those of `own`, collectives are copies on the stream that is named,
/// between buffers of the sizes that they have in such a world. So that one GPU shows where memory
/// goes and what runs beside what, though not what the ranks' values add up to.
class Loopback : public comm::Runtime {
 public:
  /// `own`, of a world of one, must outlive it.
  Loopback(comm::Runtime& own, int rank, int world_size);

  int rank() const override { return world_->rank(); }
  int world_size() const override { return world_->size(); }
  c10::Device device() const override { return own_.device(); }
  std::string backend() const override { return "loopback"; }
  comm::ReductionOrder reduction_order() const override { return own_.reduction_order(); }
  const comm::CommunicatorPtr& world() override { return world_; }
  comm::Stream& compute_stream() override { return own_.compute_stream(); }
  std::shared_ptr<comm::Stream> create_stream(const std::string& name,
                                              comm::StreamPriority priority) override {
    return own_.create_stream(name, priority);
  }
  at::Generator default_generator() override { return own_.default_generator(); }
  comm::DeviceGrid device_grid() const override { return own_.device_grid(); }
  comm::MemoryUse memory_use() const override { return own_.memory_use(); }

 private:
  comm::Runtime& own_;
  comm::CommunicatorPtr world_;
};

}  // namespace ppfsdp::nccl::testing
