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

/// Bytes; 0 for a tensor that cannot have any.
size_t memory_under(const at::Tensor& tensor) {
  const bool has_storage = tensor.defined() && tensor.unsafeGetTensorImpl()->has_storage();
  return has_storage ? tensor.storage().nbytes() : 0;
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
    const size_t bytes = memory_under(tensor);
    comm::Runtime::free_storage(tensor);
    // Who reads it too late sees NaN and does not crash.
    if (world_->options().poison && bytes != 0) {
      world_->put_poison_under(*tensor.storage().unsafeGetStorageImpl(), bytes);
    }
    world_->scheduler().point(rank_, Point::kQueue);
  }

  void alloc_storage(const at::Tensor& tensor) override {
    const bool poisoned =
        memory_under(tensor) != 0 && world_->is_on_poison(*tensor.storage().unsafeGetStorageImpl());
    if (poisoned) comm::Runtime::free_storage(tensor);
    const size_t before = memory_under(tensor);
    comm::Runtime::alloc_storage(tensor);
    const size_t after = memory_under(tensor);
    if (world_->options().poison && after != before) {
      poison(tensor.storage().mutable_data(), after);
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
