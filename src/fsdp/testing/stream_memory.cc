#include "src/fsdp/testing/stream_memory.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <utility>

#include "src/dtensor/dtensor.h"

namespace ppfsdp::fsdp::testing {

using Clock = StreamMemory::Clock;

namespace {

struct Block {
  std::weak_ptr<StreamMemory::State> state;
  size_t bytes;
  int owner;
  /// The owner's time when it was allocated: what the owner did before may be in the same memory.
  int64_t born;
  /// The uses by others, of blocks freed before, that the owner had not waited for.
  Clock unfinished;
  Clock reads;
  Clock writes;
};

void note(Clock& clock, int stream, int64_t time) { clock[stream] = std::max(clock[stream], time); }

int64_t time_of(const Clock& clock, int stream) {
  const auto found = clock.find(stream);
  return found == clock.end() ? 0 : found->second;
}

}  // namespace

struct StreamMemory::State {
  std::vector<std::string> names;
  std::vector<Clock> clocks;
  /// By owner: uses of freed blocks by other streams that it has not waited for.
  std::vector<Clock> unfinished;
  int current = kCompute;
  std::vector<std::string> faults;

  void fault(const std::string& text) {
    if (std::find(faults.begin(), faults.end(), text) == faults.end()) faults.push_back(text);
  }

  void born(Block& block) {
    block.owner = current;
    block.born = time_of(clocks[current], current);
    for (const auto& [stream, time] : unfinished[current]) {
      if (time_of(clocks[current], stream) < time) block.unfinished[stream] = time;
    }
  }

  void freed(const Block& block) {
    for (const Clock* uses : {&block.reads, &block.writes}) {
      for (const auto& [stream, time] : *uses) {
        if (stream != block.owner && time_of(clocks[block.owner], stream) < time) {
          note(unfinished[block.owner], stream, time);
        }
      }
    }
  }

  void access(Block& block, bool writes) {
    Clock& clock = clocks[current];
    const int64_t now = ++clock[current];
    const std::string what = names[current] + (writes ? " writes" : " reads");
    const std::string tensor =
        " a tensor of " + std::to_string(block.bytes) + " bytes of " + names[block.owner] + "'s";
    const auto check = [&](const Clock& uses, const std::string& of_others) {
      for (const auto& [stream, time] : uses) {
        if (time_of(clock, stream) < time) fault(what + tensor + of_others + names[stream]);
      }
    };
    check(block.unfinished, " that may lie in freed memory still used by ");
    if (time_of(clock, block.owner) < block.born) {
      fault(what + tensor + " without waiting for what that did there before");
    }
    check(block.writes, " before it is written by ");
    if (writes) check(block.reads, " that is still read by ");
    note(writes ? block.writes : block.reads, current, now);
  }
};

namespace {

std::weak_ptr<StreamMemory::State>& active() {
  static std::weak_ptr<StreamMemory::State> state;
  return state;
}

void release(void* context) {
  const std::unique_ptr<Block> block(static_cast<Block*>(context));
  if (const auto state = block->state.lock()) state->freed(*block);
}

Block* block_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return nullptr;
  if (dtensor::is_dtensor(tensor)) return block_of(dtensor::local_of(tensor));
  if (!tensor.has_storage()) return nullptr;
  const c10::DataPtr& data = tensor.storage().data_ptr();
  return data.get_deleter() == &release ? static_cast<Block*>(data.get_context()) : nullptr;
}

class Pools : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(c10::kMeta);
    const auto state = active().lock();
    if (state == nullptr || bytes == 0) return {nullptr, device};
    auto block = std::make_unique<Block>();
    block->state = state;
    block->bytes = bytes;
    state->born(*block);
    return {nullptr, block.release(), &release, device};
  }
  void copy_data(void*, const void*, size_t) const override {}
};

template <typename Visitor>
void visit(const c10::IValue& value, const Visitor& visitor) {
  if (value.isTensor()) {
    visitor(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) visit(element, visitor);
  }
}

/// Views are made on the host, and empty tensors left as they are.
bool touches_no_memory(const c10::FunctionSchema& schema) {
  const std::string& name = schema.name();
  if (name.starts_with("aten::empty") || name.starts_with("aten::new_empty")) return true;
  return std::any_of(schema.returns().begin(), schema.returns().end(), [](const auto& value) {
    return value.alias_info() != nullptr && !value.alias_info()->isWrite();
  });
}

void observe(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::TESTING_ONLY_GenericMode);
  const c10::FunctionSchema& schema = op.schema();
  const auto state = active().lock();
  if (state == nullptr || touches_no_memory(schema)) {
    op.callBoxed(stack);
    return;
  }
  const auto access = [&](const c10::IValue& value, bool writes) {
    visit(value, [&](const at::Tensor& tensor) {
      if (Block* block = block_of(tensor)) state->access(*block, writes);
    });
  };
  const size_t base = stack->size() - schema.arguments().size();
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::AliasInfo* alias = schema.arguments()[i].alias_info();
    access((*stack)[base + i], alias != nullptr && alias->isWrite());
  }
  op.callBoxed(stack);
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    if (schema.returns()[i].alias_info() == nullptr) access((*stack)[base + i], /*writes=*/true);
  }
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&observe>());
}

}  // namespace

struct StreamMemory::Observe {
  Observe() { c10::SetAllocator(c10::kMeta, &pools); }
  ~Observe() { c10::SetAllocator(c10::kMeta, before); }

  c10::Allocator* before = c10::GetAllocator(c10::kMeta);
  Pools pools;
  c10::impl::IncludeDispatchKeyGuard ops{c10::DispatchKey::TESTING_ONLY_GenericMode};
};

StreamMemory::StreamMemory() : state_(std::make_shared<State>()) {
  TORCH_CHECK(active().expired(), "StreamMemory: there is one already");
  add_stream("compute");
  active() = state_;
  observe_ = std::make_unique<Observe>();
}

StreamMemory::~StreamMemory() = default;

int StreamMemory::add_stream(const std::string& name) {
  state_->names.push_back(name);
  state_->clocks.emplace_back();
  state_->unfinished.emplace_back();
  return static_cast<int>(state_->clocks.size()) - 1;
}

Clock StreamMemory::record(int stream) {
  ++state_->clocks[stream][stream];
  return state_->clocks[stream];
}

void StreamMemory::wait(int stream, const Clock& event) {
  for (const auto& [other, time] : event) note(state_->clocks[stream], other, time);
}

const Clock& StreamMemory::knows(int stream) const { return state_->clocks[stream]; }

StreamMemory::On::On(StreamMemory& memory, int stream)
    : memory_(memory), before_(std::exchange(memory.state_->current, stream)) {}

StreamMemory::On::~On() { memory_.state_->current = before_; }

void StreamMemory::access(const at::Tensor& tensor, bool writes) {
  if (Block* block = block_of(tensor)) state_->access(*block, writes);
}

const std::vector<std::string>& StreamMemory::faults() const { return state_->faults; }

}  // namespace ppfsdp::fsdp::testing
