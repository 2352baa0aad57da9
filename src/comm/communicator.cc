#include "src/comm/communicator.h"

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace ppfsdp::comm {
namespace {

std::string describe(const at::Tensor& tensor) {
  return fmt::format("{}[{}]", c10::toString(tensor.scalar_type()),
                     fmt::join(tensor.sizes(), ", "));
}

bool is_reducible(at::ScalarType dtype) {
  switch (dtype) {
    case at::kByte:
    case at::kChar:
    case at::kShort:
    case at::kInt:
    case at::kLong:
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat:
    case at::kDouble:
      return true;
    default:
      return false;
  }
}

/// Whether the memory of the two contiguous tensors overlaps. Tensors without memory (meta, empty)
/// overlap nothing.
bool overlap(const at::Tensor& a, const at::Tensor& b) {
  const auto* a_begin = static_cast<const char*>(a.const_data_ptr());
  const auto* b_begin = static_cast<const char*>(b.const_data_ptr());
  return a_begin != nullptr && b_begin != nullptr && a_begin < b_begin + b.nbytes() &&
         b_begin < a_begin + a.nbytes();
}

/// Whether `part` is exactly slot `index` of `whole`.
bool is_slot(const at::Tensor& part, const at::Tensor& whole, int index) {
  return static_cast<const char*>(part.const_data_ptr()) ==
         static_cast<const char*>(whole.const_data_ptr()) + index * part.nbytes();
}

}  // namespace

/// Checks the arguments of one call; every message starts with the operation and the group.
class Communicator::Checker {
 public:
  Checker(const Communicator& communicator, const char* operation)
      : communicator_(communicator), operation_(operation) {}

  void tensor(const at::Tensor& tensor, const char* argument) const {
    TORCH_CHECK(tensor.defined(), where(), argument, " is an undefined tensor");
    TORCH_CHECK(tensor.layout() == at::kStrided && tensor.unsafeGetTensorImpl()->has_storage(),
                where(), argument, " must be a dense tensor with memory of its own, got ",
                describe(tensor), " of layout ", tensor.layout(),
                " without storage (of a DTensor, pass the local tensor)");
    TORCH_CHECK(tensor.device() == communicator_.device_, where(), argument, " must be on ",
                communicator_.device_, ", got ", describe(tensor), " on ", tensor.device());
    TORCH_CHECK(tensor.is_contiguous(), where(), argument, " must be contiguous, got ",
                describe(tensor), " with strides ", tensor.strides());
    const auto needed = (tensor.numel() == 0 ? 0 : tensor.storage_offset() + tensor.numel()) *
                        static_cast<int64_t>(tensor.itemsize());
    TORCH_CHECK(static_cast<int64_t>(tensor.storage().nbytes()) >= needed, where(), argument, " (",
                describe(tensor), ") needs ", needed, " bytes, but its storage has ",
                tensor.storage().nbytes(), ": it was freed");
  }

  void same_dtype(const at::Tensor& output, const at::Tensor& input) const {
    TORCH_CHECK(output.scalar_type() == input.scalar_type(), where(),
                "output and input must have one dtype, got output ", describe(output),
                " and input ", describe(input));
  }

  /// `whole` holds one `part` for each rank; `part` may be this rank's slot of it.
  void slots(const at::Tensor& whole, const char* whole_name, const at::Tensor& part,
             const char* part_name) const {
    const int64_t size = communicator_.size();
    TORCH_CHECK(whole.numel() == part.numel() * size, where(), whole_name, ".numel() must be ",
                size, " * ", part_name, ".numel() = ", size * part.numel(), ", got ", whole.numel(),
                " (", whole_name, " ", describe(whole), ", ", part_name, " ", describe(part), ")");
    TORCH_CHECK(!overlap(whole, part) || is_slot(part, whole, communicator_.rank_), where(),
                part_name, " overlaps ", whole_name, " but is not its slot ", communicator_.rank_,
                "; pass that slot or separate memory");
  }

  void reduction(const ReduceOp& op, at::ScalarType dtype) const {
    TORCH_CHECK(is_reducible(dtype), where(), "cannot reduce ", dtype,
                " tensors; supported are Byte, Char, Short, Int, Long, Half, BFloat16, Float and "
                "Double");
    const bool needs_floating =
        op.kind == ReduceOp::Kind::kAvg || op.kind == ReduceOp::Kind::kPremulSum;
    TORCH_CHECK(!needs_floating || c10::isFloatingType(dtype), where(), to_string(op),
                " needs a floating-point dtype, got ", dtype);
    TORCH_CHECK(
        op.kind != ReduceOp::Kind::kPremulSum || (std::isfinite(op.factor) && op.factor >= 0.0),
        where(), "the factor of premul_sum must be finite and not negative, got ", op.factor);
  }

  void root(int root) const {
    TORCH_CHECK(root >= 0 && root < communicator_.size(), where(), "root must be in [0, ",
                communicator_.size(), "), got ", root);
  }

  void peer(int peer) const {
    TORCH_CHECK(peer >= 0 && peer < communicator_.size() && peer != communicator_.rank_, where(),
                "peer must be another rank in [0, ", communicator_.size(), "), got ", peer);
  }

  std::vector<int64_t> splits(c10::ArrayRef<int64_t> splits, const at::Tensor& tensor,
                              const char* argument) const {
    const int64_t size = communicator_.size();
    if (splits.empty()) {
      TORCH_CHECK(tensor.numel() % size == 0, where(), argument,
                  " without splits must divide into ", size, " equal parts, got ",
                  describe(tensor));
      return std::vector<int64_t>(size, tensor.numel() / size);
    }
    TORCH_CHECK(static_cast<int64_t>(splits.size()) == size, where(), argument,
                "_splits must have one entry a rank, ", size, ", got ", splits.size());
    int64_t sum = 0;
    for (const int64_t split : splits) {
      TORCH_CHECK(split >= 0, where(), argument, "_splits must not be negative, got ", splits);
      sum += split;
    }
    TORCH_CHECK(sum == tensor.numel(), where(), argument, "_splits ", splits, " sum to ", sum,
                ", but ", argument, " (", describe(tensor), ") has ", tensor.numel(), " elements");
    return splits.vec();
  }

  void disjoint(const at::Tensor& output, const at::Tensor& input) const {
    TORCH_CHECK(!overlap(output, input), where(), "output and input must not overlap");
  }

  void members(const std::vector<int>& members, const std::string& name) const {
    TORCH_CHECK(!name.empty(), where(), "the new group needs a name");
    TORCH_CHECK(
        std::adjacent_find(members.begin(), members.end(), std::greater_equal<>()) ==
                members.end() &&
            (members.empty() || (members.front() >= 0 && members.back() < communicator_.size())),
        where(), "members must be strictly ascending ranks in [0, ", communicator_.size(),
        "), got [", fmt::format("{}", fmt::join(members, ", ")), "]");
    TORCH_CHECK(std::binary_search(members.begin(), members.end(), communicator_.rank_), where(),
                "members must hold this rank, ", communicator_.rank_, ", got [",
                fmt::format("{}", fmt::join(members, ", ")), "]");
  }

 private:
  std::string where() const {
    return fmt::format("{} on group '{}' (rank {} of {}): ", operation_, communicator_.name_,
                       communicator_.rank_, communicator_.size());
  }

  const Communicator& communicator_;
  const char* operation_;
};

/// Gives the communicator a label for the time of one call.
class Communicator::Labelled {
 public:
  Labelled(Communicator& communicator, std::string_view label) : communicator_(communicator) {
    communicator_.label_ = label;
  }
  ~Labelled() { communicator_.label_ = {}; }
  Labelled(const Labelled&) = delete;
  Labelled& operator=(const Labelled&) = delete;

 private:
  Communicator& communicator_;
};

Communicator::Communicator(std::string name, std::vector<int> ranks, int rank, c10::Device device)
    : name_(std::move(name)), ranks_(std::move(ranks)), rank_(rank), device_(device) {
  TORCH_CHECK(rank_ >= 0 && rank_ < size(), "Communicator '", name_, "': rank must be in [0, ",
              size(), "), got ", rank_);
}

void Communicator::all_gather_into(const at::Tensor& output, const at::Tensor& input,
                                   Stream& stream, std::string_view label) {
  const Checker check(*this, "all_gather_into");
  check.tensor(output, "output");
  check.tensor(input, "input");
  check.same_dtype(output, input);
  check.slots(output, "output", input, "input");
  const Labelled labelled(*this, label);
  do_all_gather_into(output, input, stream);
  ++sequence_;
}

at::Tensor Communicator::all_gather(const at::Tensor& input, Stream& stream,
                                    std::string_view label) {
  Checker(*this, "all_gather").tensor(input, "input");
  const Labelled labelled(*this, label);
  at::Tensor output = do_all_gather(input, stream);
  ++sequence_;
  return output;
}

at::Tensor Communicator::do_all_gather(const at::Tensor& input, Stream& stream) {
  const at::Tensor output = stream.empty({size() * input.numel()}, input.options());
  do_all_gather_into(output, input, stream);
  return output;
}

at::Tensor Communicator::allocate(int64_t numel, at::ScalarType dtype, Stream& stream) {
  TORCH_CHECK(numel >= 0, "allocate on group '", name_, "': numel must not be negative, got ",
              numel);
  return do_allocate(numel, dtype, stream);
}

at::Tensor Communicator::do_allocate(int64_t numel, at::ScalarType dtype, Stream& stream) {
  return stream.empty({numel}, at::TensorOptions(dtype).device(device_));
}

void Communicator::reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                  const ReduceOp& op, Stream& stream, std::string_view label) {
  const Checker check(*this, "reduce_scatter");
  check.tensor(output, "output");
  check.tensor(input, "input");
  check.same_dtype(output, input);
  check.slots(input, "input", output, "output");
  check.reduction(op, input.scalar_type());
  const Labelled labelled(*this, label);
  do_reduce_scatter(output, input, op, stream);
  ++sequence_;
}

void Communicator::all_reduce(const at::Tensor& tensor, const ReduceOp& op, Stream& stream,
                              std::string_view label) {
  const Checker check(*this, "all_reduce");
  check.tensor(tensor, "tensor");
  check.reduction(op, tensor.scalar_type());
  const Labelled labelled(*this, label);
  do_all_reduce(tensor, op, stream);
  ++sequence_;
}

void Communicator::broadcast(const at::Tensor& tensor, int root, Stream& stream) {
  const Checker check(*this, "broadcast");
  check.tensor(tensor, "tensor");
  check.root(root);
  do_broadcast(tensor, root, stream);
  ++sequence_;
}

void Communicator::all_to_all(const at::Tensor& output, const at::Tensor& input,
                              c10::ArrayRef<int64_t> output_splits,
                              c10::ArrayRef<int64_t> input_splits, Stream& stream) {
  const Checker check(*this, "all_to_all");
  check.tensor(output, "output");
  check.tensor(input, "input");
  check.same_dtype(output, input);
  check.disjoint(output, input);
  do_all_to_all(output, input, check.splits(output_splits, output, "output"),
                check.splits(input_splits, input, "input"), stream);
  ++sequence_;
}

void Communicator::send(const at::Tensor& tensor, int peer, Stream& stream) {
  const Checker check(*this, "send");
  check.tensor(tensor, "tensor");
  check.peer(peer);
  do_send(tensor, peer, stream);
}

void Communicator::recv(const at::Tensor& tensor, int peer, Stream& stream) {
  const Checker check(*this, "recv");
  check.tensor(tensor, "tensor");
  check.peer(peer);
  do_recv(tensor, peer, stream);
}

void Communicator::barrier() {
  do_barrier();
  ++sequence_;
}

CommunicatorPtr Communicator::subgroup(const std::vector<int>& members, const std::string& name) {
  Checker(*this, "subgroup").members(members, name);
  CommunicatorPtr group = do_subgroup(members, name);
  ++sequence_;
  return group;
}

}  // namespace ppfsdp::comm
