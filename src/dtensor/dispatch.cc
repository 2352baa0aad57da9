// The fallback under DispatchKey::Fake: every op with a DTensor among its arguments ends here,
// below autograd.
//
// A call's plan depends on the op, the specs of its tensors and, for some rules, its other
// arguments. Those make the key of a cache, so that the rule is asked once. Specs have ids that are
// never used again, so a key never means two things. The caches are the thread's own: ranks may be
// threads of one process, and backward of a CUDA graph runs on threads of the engine.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <memory>
#include <unordered_map>
#include <vector>

#include "src/dtensor/dtensor_impl.h"
#include "src/dtensor/redistribute.h"
#include "src/dtensor/rule.h"
#include "src/dtensor/sharding.h"

namespace ppfsdp::dtensor {
namespace {

using Stack = torch::jit::Stack;
using Words = c10::SmallVector<uint64_t, 24>;

/// How a key's words begin, so that no sequence of values reads as another.
enum Tag : uint64_t { kNone, kPlain, kDTensor, kList, kInt, kDouble, kBool, kText, kOther };
constexpr uint64_t kTagBits = 4;

uint64_t tagged(Tag tag, uint64_t value) { return (value << kTagBits) | tag; }

void add_tensor(const at::Tensor& tensor, Words& words) {
  if (const DTensorImpl* impl = impl_of(tensor)) {
    words.push_back(tagged(kDTensor, impl->spec()->id));
  } else if (!tensor.defined()) {
    words.push_back(kNone);
  } else {
    const uint64_t dtype = static_cast<uint64_t>(tensor.scalar_type());
    words.push_back(tagged(kPlain, static_cast<uint64_t>(tensor.dim()) << 8 | dtype));
    for (int64_t size : tensor.sizes()) {
      words.push_back(static_cast<uint64_t>(size));
    }
    for (int64_t stride : tensor.strides()) {
      words.push_back(static_cast<uint64_t>(stride));
    }
  }
}

void add_argument(const c10::IValue& value, Words& words) {
  if (value.isTensor()) {
    add_tensor(value.toTensor(), words);
  } else if (value.isNone()) {
    words.push_back(kNone);
  } else if (value.isInt()) {
    words.push_back(kInt);
    words.push_back(static_cast<uint64_t>(value.toInt()));
  } else if (value.isDouble()) {
    words.push_back(kDouble);
    words.push_back(std::bit_cast<uint64_t>(value.toDouble()));
  } else if (value.isBool()) {
    words.push_back(tagged(kBool, value.toBool() ? 1 : 0));
  } else if (value.isList()) {
    const c10::ArrayRef<c10::IValue> elements = value.toListRef();
    words.push_back(tagged(kList, elements.size()));
    for (const c10::IValue& element : elements) {
      add_argument(element, words);
    }
  } else if (value.isString()) {
    const std::string& text = value.toStringRef();
    words.push_back(tagged(kText, text.size()));
    for (char letter : text) {
      words.push_back(static_cast<uint64_t>(letter));
    }
  } else {
    // Devices, generators and the like: no rule's plan depends on them.
    words.push_back(kOther);
  }
}

uint64_t hash_of(const Words& words) {
  uint64_t hash = words.size();
  for (uint64_t word : words) {
    hash = (hash ^ word) * 0x9e3779b97f4a7c15ULL;
    hash ^= hash >> 29;
  }
  return hash;
}

struct TensorArgument {
  size_t index;
  bool written;
};

struct Return {
  /// Which of the op's tensor arguments it returns, having written to it; -1 for a new value.
  int64_t written_argument = -1;
  /// Which of the op's tensor arguments it is a view of; -1 for memory of its own.
  int64_t viewed_argument = -1;
};

struct Entry {
  std::vector<uint64_t> key;
  Plan plan;
  bool moves = false;
  /// One a result of the plan; weak, since a cache must not keep a mesh alive.
  std::vector<std::weak_ptr<const Spec>> results;

  bool matches(const Words& words) const {
    return std::equal(key.begin(), key.end(), words.begin(), words.end());
  }
};

/// Whether a tensor is in values of this type, alone, optional or in a list.
bool holds_tensors(const c10::Type& type) {
  if (type.kind() == c10::TypeKind::TensorType) {
    return true;
  }
  if (type.kind() == c10::TypeKind::OptionalType || type.kind() == c10::TypeKind::ListType) {
    return holds_tensors(*type.containedType(0));
  }
  return false;
}

/// What the fallback needs to know of an op, and the plans made for it.
class OpState {
 public:
  explicit OpState(const c10::OperatorHandle& op) : op_(op) {
    const c10::FunctionSchema& schema = op.schema();
    const c10::OperatorName& name = op.operator_name();
    rule_ =
        find_rule(name.overload_name.empty() ? name.name : name.name + "." + name.overload_name);
    decomposes_ =
        rule_ == nullptr && op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      const c10::Argument& argument = schema.arguments()[i];
      if (!holds_tensors(*argument.type())) {
        others_.push_back(i);
        continue;
      }
      const c10::AliasInfo* alias = argument.alias_info();
      tensors_.push_back({i, alias != nullptr && alias->isWrite()});
      writes_ = writes_ || tensors_.back().written;
    }
    for (const c10::Argument& value : schema.returns()) {
      Return result;
      const c10::AliasInfo* alias = value.alias_info();
      for (size_t k = 0; alias != nullptr && k < tensors_.size(); ++k) {
        const c10::AliasInfo* other = schema.arguments()[tensors_[k].index].alias_info();
        if (other != nullptr && other->beforeSets() == alias->beforeSets()) {
          (alias->isWrite() ? result.written_argument : result.viewed_argument) =
              static_cast<int64_t>(k);
        }
      }
      returns_.push_back(result);
    }
  }

  void run(Stack& stack) {
    if (decomposes_) {
      op_.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, stack);
      return;
    }
    const size_t base = stack.size() - op_.schema().arguments().size();
    Words words;
    for (const TensorArgument& argument : tensors_) {
      add_argument(stack[base + argument.index], words);
    }
    if (rule_ != nullptr && rule_->reads_arguments) {
      for (size_t index : others_) {
        add_argument(stack[base + index], words);
      }
    }
    if (last_ == nullptr || !last_->matches(words)) {
      last_ = find_or_plan(words, stack, base);
    }
    // A local op may come back here for another call of this op and change last_.
    execute(std::shared_ptr<Entry>(last_), stack, base);
  }

 private:
  std::shared_ptr<Entry> find_or_plan(const Words& words, const Stack& stack, size_t base) {
    std::vector<std::shared_ptr<Entry>>& bucket = entries_[hash_of(words)];
    for (const std::shared_ptr<Entry>& entry : bucket) {
      if (entry->matches(words)) {
        return entry;
      }
    }
    auto entry = std::make_shared<Entry>();
    entry->key.assign(words.begin(), words.end());
    entry->plan = make_plan(stack, base);
    entry->moves = std::any_of(entry->plan.inputs.begin(), entry->plan.inputs.end(),
                               [](const Placements& to) { return !to.empty(); });
    entry->results.resize(entry->plan.results.size());
    // Shapes that never come again, of varying batches say, must not pile up.
    constexpr size_t kMostEntries = 4096;
    if (entries_.size() >= kMostEntries) {
      entries_.clear();
    }
    entries_[hash_of(words)].push_back(entry);
    return entry;
  }

  Plan make_plan(const Stack& stack, size_t base) const {
    std::vector<Operand> operands;
    std::vector<const at::Tensor*> tensors;
    for (const TensorArgument& argument : tensors_) {
      visit(stack[base + argument.index], [&](const at::Tensor& tensor) {
        operands.push_back({nullptr, argument.index, impl_of(tensor) == nullptr, argument.written});
        tensors.push_back(&tensor);
      });
    }
    const auto first = std::find_if(tensors.begin(), tensors.end(),
                                    [](const at::Tensor* t) { return impl_of(*t) != nullptr; });
    const mesh::DeviceMeshPtr& mesh = impl_of(**first)->spec()->mesh;
    for (size_t k = 0; k < operands.size(); ++k) {
      const at::Tensor& tensor = *tensors[k];
      operands[k].spec = operands[k].plain
                             ? make_spec(mesh, Placements(mesh->ndim()), tensor.sizes(),
                                         tensor.strides(), tensor.scalar_type())
                             : impl_of(tensor)->spec();
    }
    const Call call(op_, c10::ArrayRef<c10::IValue>(stack).slice(base), std::move(operands));
    TORCH_CHECK_NOT_IMPLEMENTED(rule_ != nullptr, "DTensor: no sharding rule for ", call.str(),
                                "; bring the operands to local tensors (to_local, full_tensor) "
                                "round this op, or register a "
                                "rule for it (src/dtensor/rule.h)");
    Plan plan = rule_->plan(call);
    set_strides(plan, call, stack, base);
    plan.inputs.resize(call.operands().size());
    for (size_t k = 0; k < plan.inputs.size(); ++k) {
      if (plan.inputs[k] == call.operands()[k].spec->placements) {
        plan.inputs[k].clear();
      }
    }
    return plan;
  }

  /// The results' global strides, as the op gives them for meta tensors of the global sizes and
  /// strides. They must not come from the local results: of a part of one row or none the strides
  /// say little, and ranks that took them for different things would part ways in the next reshape.
  /// An op without a meta kernel is taken to keep the layout of its first operand of that size.
  void set_strides(Plan& plan, const Call& call, const Stack& stack, size_t base) const {
    if (plan.results.empty()) {
      return;
    }
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const std::vector<at::Tensor> results = meta_results(stack, base);
    for (size_t k = 0; k < plan.results.size(); ++k) {
      Result& planned = plan.results[k];
      if (k < results.size() && results[k].sizes() == c10::IntArrayRef(planned.sizes)) {
        planned.strides = results[k].strides().vec();
        continue;
      }
      const auto same_sizes = [&](const Operand& operand) {
        return operand.spec->sizes == planned.sizes;
      };
      const auto& operands = call.operands();
      const auto like = std::find_if(operands.begin(), operands.end(), same_sizes);
      planned.strides =
          (like == operands.end()
               ? at::empty(planned.sizes, at::TensorOptions(at::kMeta))
               : at::empty_like(meta_of(like->spec->sizes, like->spec->strides, like->spec->dtype)))
              .strides()
              .vec();
    }
  }

  static at::Tensor meta_of(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                            at::ScalarType dtype) {
    return at::empty_strided(sizes, strides, at::TensorOptions(at::kMeta).dtype(dtype));
  }

  /// What the op returns for meta tensors, those that it wrote to left out; nothing when it has no
  /// meta kernel.
  std::vector<at::Tensor> meta_results(const Stack& stack, size_t base) const {
    Stack meta(stack.begin() + static_cast<std::ptrdiff_t>(base), stack.end());
    const auto to_meta = [](const at::Tensor& tensor) {
      return tensor.defined() ? meta_of(tensor.sizes(), tensor.strides(), tensor.scalar_type())
                              : tensor;
    };
    std::vector<at::Tensor> results;
    try {
      for (const TensorArgument& argument : tensors_) {
        c10::IValue& value = meta[argument.index];
        if (value.isTensor()) {
          value = to_meta(value.toTensor());
        } else if (value.isTensorList()) {
          c10::List<at::Tensor> list;
          for (const at::Tensor& tensor : value.toTensorVector()) {
            list.push_back(to_meta(tensor));
          }
          value = std::move(list);
        }
      }
      op_.callBoxed(&meta);
    } catch (const c10::Error&) {
      return {};
    }
    for (size_t k = 0; k < returns_.size(); ++k) {
      if (returns_[k].written_argument < 0) {
        visit(meta[k], [&](const at::Tensor& tensor) { results.push_back(tensor); });
      }
    }
    return results;
  }

  template <typename Visitor>
  static void visit(const c10::IValue& value, const Visitor& visitor) {
    if (value.isTensor()) {
      if (value.toTensor().defined()) {
        visitor(value.toTensor());
      }
    } else if (value.isList()) {
      for (const c10::IValue& element : value.toListRef()) {
        visit(element, visitor);
      }
    }
  }

  /// A tensor that was moved for the op, to be put back because the op writes to it.
  struct Moved {
    at::Tensor local;
    at::Tensor moved;
    SpecPtr spec;
    const Placements* placements;
  };

  /// In-place ops have a kernel above that counts the write and excludes its key before it calls
  /// us. The ops on lists have none: LibTorch leaves that to the ops on single tensors inside them.
  void note_writes(const Stack& stack, size_t base) const {
    const bool counted = c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::ADInplaceOrView);
    for (const TensorArgument& argument : tensors_) {
      if (argument.written) {
        visit(stack[base + argument.index], [&](const at::Tensor& tensor) {
          if (impl_of(tensor) != nullptr) {
            static_cast<DTensorImpl*>(tensor.unsafeGetTensorImpl())->note_write(counted);
          }
        });
      }
    }
  }

  struct Frame {
    Entry& entry;
    c10::SmallVector<c10::IValue, 6> originals;
    std::vector<Moved> moved;
  };

  /// The spec of DTensor `operand`; of the first DTensor when that one is plain.
  static const SpecPtr& spec_of_operand(const Frame& frame, size_t operand) {
    const SpecPtr* first = nullptr;
    const SpecPtr* wanted = nullptr;
    size_t k = 0;
    for (const c10::IValue& original : frame.originals) {
      visit(original, [&](const at::Tensor& tensor) {
        const DTensorImpl* impl = impl_of(tensor);
        if (impl != nullptr) {
          first = first == nullptr ? &impl->spec() : first;
          wanted = k == operand ? &impl->spec() : wanted;
        }
        ++k;
      });
    }
    return wanted != nullptr ? *wanted : *first;
  }

  static at::Tensor localise(Frame& frame, const at::Tensor& tensor, size_t operand, bool written) {
    const DTensorImpl* impl = impl_of(tensor);
    if (!frame.entry.moves || frame.entry.plan.inputs[operand].empty()) {
      return impl != nullptr ? impl->local() : tensor;
    }
    const Placements& to = frame.entry.plan.inputs[operand];
    if (impl == nullptr) {
      const std::vector<size_t>& meshes = frame.entry.plan.mesh_operands;
      const SpecPtr& spec = spec_of_operand(frame, meshes.empty() ? 0 : meshes[operand]);
      return redistribute_local(tensor, spec->mesh, tensor.sizes(), Placements(spec->mesh->ndim()),
                                to);
    }
    const SpecPtr& spec = impl->spec();
    const bool remembers = spec->sizes.empty() && !written && to == Placements(to.size());
    at::Tensor moved = remembers ? impl->remembered_whole() : at::Tensor();
    if (moved.defined()) {
      return moved;
    }
    moved = redistribute_local(impl->local(), spec->mesh, spec->sizes, spec->placements, to);
    if (remembers) {
      impl->remember_whole(moved);
    }
    if (written) {
      moved = moved.is_alias_of(impl->local()) ? moved.clone() : moved;
      frame.moved.push_back({impl->local(), moved, spec, &to});
    }
    return moved;
  }

  void execute(const std::shared_ptr<Entry>& entry, Stack& stack, size_t base) const {
    if (writes_) {
      note_writes(stack, base);
    }
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    Frame frame{*entry, {}, {}};
    // All originals first: a plain operand that moves asks the others for the mesh.
    for (const TensorArgument& argument : tensors_) {
      frame.originals.push_back(std::move(stack[base + argument.index]));
    }
    size_t operand = 0;
    for (size_t k = 0; k < tensors_.size(); ++k) {
      const bool written = tensors_[k].written;
      const c10::IValue& original = frame.originals[k];
      c10::IValue& slot = stack[base + tensors_[k].index];
      if (original.isTensor()) {
        const at::Tensor& tensor = original.toTensor();
        slot = tensor.defined() ? localise(frame, tensor, operand++, written) : tensor;
      } else if (original.isTensorList()) {
        c10::List<at::Tensor> locals;
        const c10::ArrayRef<c10::IValue> elements = original.toListRef();
        locals.reserve(elements.size());
        for (const c10::IValue& element : elements) {
          const at::Tensor& tensor = element.toTensor();
          locals.push_back(tensor.defined() ? localise(frame, tensor, operand++, written) : tensor);
        }
        slot = std::move(locals);
      } else if (original.isList()) {
        c10::List<std::optional<at::Tensor>> locals;
        for (const c10::IValue& element : original.toListRef()) {
          locals.push_back(element.isNone()
                               ? std::optional<at::Tensor>()
                               : localise(frame, element.toTensor(), operand++, written));
        }
        slot = std::move(locals);
      } else {
        slot = original;
      }
    }

    if (entry->plan.local) {
      entry->plan.local(LocalCall{op_, stack, spec_of_operand(frame, 0)->mesh});
    } else {
      op_.callBoxed(&stack);
    }

    for (const Moved& moved : frame.moved) {
      moved.local.copy_(redistribute_local(moved.moved, moved.spec->mesh, moved.spec->sizes,
                                           *moved.placements, moved.spec->placements));
    }
    size_t result = 0;
    const size_t first = stack.size() - returns_.size();
    for (size_t k = 0; k < returns_.size(); ++k) {
      c10::IValue& slot = stack[first + k];
      if (returns_[k].written_argument >= 0) {
        slot = frame.originals[returns_[k].written_argument];
      } else if (slot.isTensor()) {
        slot = wrap(frame, returns_[k], result++, std::move(slot).toTensor());
      } else if (slot.isTensorList()) {
        c10::List<at::Tensor> wrapped;
        const c10::List<at::Tensor> locals = std::move(slot).toTensorList();
        wrapped.reserve(locals.size());
        for (size_t i = 0; i < locals.size(); ++i) {
          wrapped.push_back(wrap(frame, returns_[k], result++, locals.get(i)));
        }
        slot = std::move(wrapped);
      }
    }
  }

  at::Tensor wrap(Frame& frame, const Return& returned, size_t result, at::Tensor local) const {
    TORCH_INTERNAL_ASSERT(result < frame.entry.results.size(), "the rule of ",
                          op_.operator_name().name, " plans too few results");
    const Result& planned = frame.entry.plan.results[result];
    if (planned.plain || !local.defined()) {
      return local;
    }
    std::optional<c10::InferenceMode> normal;
    if (returned.viewed_argument >= 0) {
      const at::Tensor& viewed = frame.originals[returned.viewed_argument].toTensor();
      share_version(viewed, local);
      // A view of a normal tensor is one, in inference mode too.
      if (c10::InferenceMode::is_enabled() && !viewed.is_inference()) {
        normal.emplace(false);
      }
    } else if (!local.is_contiguous() && is_contiguous(planned)) {
      // Who asks the DTensor gets to hear that it is contiguous, and views it so.
      local = local.contiguous();
    }
    SpecPtr spec = frame.entry.results[result].lock();
    if (spec == nullptr || spec->dtype != local.scalar_type()) {
      spec = make_spec(spec_of_operand(frame, planned.mesh_operand)->mesh, planned.placements,
                       planned.sizes, planned.strides, local.scalar_type());
      frame.entry.results[result] = spec;
    }
    return make_dtensor(std::move(local), std::move(spec));
  }

  static bool is_contiguous(const Result& result) {
    int64_t stride = 1;
    for (size_t dim = result.sizes.size(); dim-- > 0;) {
      if (result.sizes[dim] != 1 && result.strides[dim] != stride) {
        return false;
      }
      stride *= result.sizes[dim];
    }
    return true;
  }

  /// A write through a view counts in the version of what it is a view of, and so it does for their
  /// local parts.
  static void share_version(const at::Tensor& viewed, const at::Tensor& local_view) {
    const DTensorImpl* impl = impl_of(viewed);
    if (impl != nullptr && !impl->local().is_inference() && !local_view.is_inference()) {
      local_view.unsafeGetTensorImpl()->set_version_counter(
          impl->local().unsafeGetTensorImpl()->version_counter());
    }
  }

  c10::OperatorHandle op_;
  const Rule* rule_;
  /// LibTorch writes the op in terms of others. It does so before we are asked, but not for
  /// inference tensors, which have no autograd key.
  bool decomposes_ = false;
  bool writes_ = false;
  std::vector<TensorArgument> tensors_;
  std::vector<size_t> others_;
  std::vector<Return> returns_;
  std::unordered_map<uint64_t, std::vector<std::shared_ptr<Entry>>> entries_;
  std::shared_ptr<Entry> last_;
};

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  thread_local ska::flat_hash_map<c10::OperatorHandle, std::unique_ptr<OpState>> states;
  std::unique_ptr<OpState>& slot = states[op];
  if (slot == nullptr) {
    slot = std::make_unique<OpState>(op);
  }
  // Not through the slot: a local function may call other ops on DTensors, and the map may grow.
  OpState* state = slot.get();
  state->run(*stack);
}

TORCH_LIBRARY_IMPL(_, Fake, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace
}  // namespace ppfsdp::dtensor
