#include "sim/mesh/world.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "sim/mesh/poison.h"
#include "sim/mesh/sim_communicator.h"
#include "sim/mesh/sim_stream.h"
#include "sim/mesh/world_state.h"
#include "src/comm/communicator.h"

namespace ppfsdp::sim {
namespace {

at::Generator copy_of_default_generator() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.clone();
}

class SimRuntime : public comm::Runtime {
 public:
  SimRuntime(std::shared_ptr<World> world, int rank)
      : world_(std::move(world)),
        rank_(rank),
        compute_(world_, world_->compute_queue(rank)),
        communicator_(std::make_shared<SimCommunicator>(world_, world_->world_group(), rank)),
        generator_(copy_of_default_generator()) {}

  int rank() const override { return rank_; }
  int world_size() const override { return world_->size(); }
  c10::Device device() const override { return c10::Device(c10::kCPU); }
  std::string backend() const override { return "sim"; }
  comm::ReductionOrder reduction_order() const override { return world_->options().order; }
  const comm::CommunicatorPtr& world() override { return communicator_; }
  comm::Stream& compute_stream() override { return compute_; }
  at::Generator default_generator() override { return generator_; }

  std::shared_ptr<comm::Stream> create_stream(const std::string& name,
                                              comm::StreamPriority) override {
    world_->check_caller(rank_, "Runtime::create_stream");
    return std::make_shared<SideStream>(world_, world_->add_stream(rank_, name, false));
  }

  void free_storage(const at::Tensor& tensor) override {
    if (!world_->options().poison) {
      comm::Runtime::free_storage(tensor);
    } else if (tensor.storage().nbytes() != 0) {
      // The memory stays with the storage, so that who reads it too late sees NaN and does not
      // crash.
      poison(tensor.storage().mutable_data(), tensor.storage().nbytes(), tensor.scalar_type());
    }
    world_->scheduler().point(rank_, Point::kQueue);
  }

  void alloc_storage(const at::Tensor& tensor) override {
    const bool had_memory = tensor.storage().nbytes() >= comm::storage_bytes(tensor);
    comm::Runtime::alloc_storage(tensor);
    // Memory that was here already is poisoned since it was freed, or in use.
    if (world_->options().poison && !had_memory) {
      poison(tensor.storage().mutable_data(), tensor.storage().nbytes(), tensor.scalar_type());
    }
    world_->scheduler().point(rank_, Point::kQueue);
  }

 private:
  std::shared_ptr<World> world_;
  int rank_;
  ComputeStream compute_;
  comm::CommunicatorPtr communicator_;
  at::Generator generator_;
};

/// Throws `error` again, its message led by the rank.
[[noreturn]] void rethrow_of_rank(int rank, const std::exception_ptr& error) {
  const std::string lead = fmt::format("rank {}: ", rank);
  try {
    std::rethrow_exception(error);
  } catch (const comm::CommError& e) {
    std::throw_with_nested(comm::CommError(lead + e.what()));
  } catch (const c10::Error& e) {
    std::throw_with_nested(c10::Error(lead + e.what_without_backtrace(), e.backtrace()));
  } catch (const std::exception& e) {
    std::throw_with_nested(std::runtime_error(lead + e.what()));
  } catch (...) {
    std::throw_with_nested(std::runtime_error(lead + "an exception that is no std::exception"));
  }
}

}  // namespace

void run_world(int n, const WorldOptions& options,
               const std::function<void(comm::Runtime& runtime)>& fn) {
  constexpr int kMaxRanks = 1024;
  TORCH_CHECK(n >= 1 && n <= kMaxRanks, "run_world: n must be in [1, ", kMaxRanks, "], got ", n);
  TORCH_CHECK(fn != nullptr, "run_world: fn is empty");
  if (at::get_num_threads() != 1) at::set_num_threads(1);
  const auto world = std::make_shared<World>(n, options);
  Scheduler& scheduler = world->scheduler();
  scheduler.run(
      [&](int rank) {
        SimRuntime runtime(world, rank);
        fn(runtime);
      },
      options.stack_bytes);
  world->clear();
  if (scheduler.error() == nullptr) return;
  if (scheduler.failed_rank() < 0) std::rethrow_exception(scheduler.error());
  rethrow_of_rank(scheduler.failed_rank(), scheduler.error());
}

}  // namespace ppfsdp::sim
