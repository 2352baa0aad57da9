#include "backends/gloo/gloo.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <numeric>
#include <utility>

#include "backends/gloo/collectives.h"
#include "backends/gloo/communicator.h"
#include "backends/gloo/group.h"
#include "backends/gloo/streams.h"
#include "backends/start/launcher.h"

namespace ppfsdp::gloo {
namespace {

constexpr uint64_t kWorldId = 1;
/// Numbers of the first and last barrier, which no collective reaches.
constexpr uint64_t kGoodbye = ~uint64_t{0};
constexpr uint64_t kHello = kGoodbye - 1;
constexpr std::chrono::milliseconds kGrace{2000};

std::shared_ptr<Group> make_world(const GlooOptions& options) {
  auto group = std::make_shared<Group>();
  group->endpoint = std::make_shared<Endpoint>(options);
  group->name = "world";
  group->ranks.resize(options.world_size);
  std::iota(group->ranks.begin(), group->ranks.end(), 0);
  group->rank = options.rank;
  group->id = kWorldId;
  return group;
}

class GlooRuntime final : public comm::Runtime {
 public:
  explicit GlooRuntime(const GlooOptions& options)
      : group_(make_world(options)),
        world_(std::make_shared<GlooCommunicator>(group_)),
        compute_("compute", progress()) {
    // Once all are past this, nobody needs rank 0's store any more.
    progress()->run(barrier({group_, kHello, true}));
  }

  ~GlooRuntime() override {
    // A rank that leaves because of an error must not keep the others waiting for it.
    if (std::uncaught_exceptions() > 0) return;
    try {
      progress()->synchronize_all();
      // What is under way to a peer may be lost when this end closes first. A peer that does not
      // come in two seconds has either received it or is gone.
      group_->endpoint->timeout = std::min(group_->endpoint->timeout, kGrace);
      progress()->run(barrier({group_, kGoodbye, true}));
    } catch (const std::exception&) {
      // The work that failed has told whoever waited for it, and nobody else is left to be told.
    }
  }

  int rank() const override { return group_->rank; }
  int world_size() const override { return group_->size(); }
  c10::Device device() const override { return c10::Device(c10::kCPU); }
  std::string backend() const override { return "gloo"; }
  comm::ReductionOrder reduction_order() const override { return comm::ReductionOrder::kGlooRing; }
  const comm::CommunicatorPtr& world() override { return world_; }
  comm::Stream& compute_stream() override { return compute_; }
  /// CPU threads have no priorities worth setting.
  std::shared_ptr<comm::Stream> create_stream(const std::string& name,
                                              comm::StreamPriority) override {
    return std::make_shared<SideStream>(name, progress());
  }

 private:
  const std::shared_ptr<Progress>& progress() const { return group_->endpoint->progress; }

  std::shared_ptr<Group> group_;
  comm::CommunicatorPtr world_;
  ComputeStream compute_;
};

}  // namespace

GlooOptions GlooOptions::from_environment() {
  GlooOptions options;
  options.take(start::read_own_launcher());
  return options;
}

std::unique_ptr<comm::Runtime> make_runtime(const GlooOptions& options) {
  options.check("gloo");
  return std::make_unique<GlooRuntime>(options);
}

}  // namespace ppfsdp::gloo
