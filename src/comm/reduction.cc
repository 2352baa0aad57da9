#include "src/comm/reduction.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

namespace ppfsdp::comm {
namespace {

constexpr std::array<std::pair<ReductionOrder, const char*>, 4> kNames = {{
    {ReductionOrder::kRankOrder, "rank_order"},
    {ReductionOrder::kGlooRing, "gloo_ring"},
    {ReductionOrder::kNcclRing, "nccl_ring"},
    {ReductionOrder::kTree, "tree"},
}};

/// Elements folded at a time: the accumulator and one input's part of it stay in the L1 cache.
constexpr int64_t kBlock = 2048;

/// How values of dtype T are held and rounded while they are folded. Half-precision values are held
/// as floats and rounded to T after every operation, which gives the bits of arithmetic in T.
template <typename T>
struct Arithmetic {
  // Integer sums wrap; in the unsigned type that is defined behaviour.
  using Held = T;
  static Held load(T value) { return value; }
  static Held round(Held value) { return value; }
  static T store(Held value) { return value; }
};

template <>
struct Arithmetic<c10::Half> {
  using Held = float;
  static float load(c10::Half value) { return static_cast<float>(value); }
  static float round(float value) { return static_cast<float>(c10::Half(value)); }
  static c10::Half store(float value) { return c10::Half(value); }
};

template <>
struct Arithmetic<c10::BFloat16> {
  using Held = float;
  static float load(c10::BFloat16 value) {
    return std::bit_cast<float>(static_cast<uint32_t>(value.x) << 16);
  }
  // Round to nearest even on the bits, without a branch so that the loops vectorise. A NaN must not
  // carry into the exponent's overflow.
  static float round(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    return std::bit_cast<float>(value != value ? 0x7fc00000u : rounded);
  }
  static c10::BFloat16 store(float value) {
    return c10::BFloat16(static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16),
                         c10::BFloat16::from_bits());
  }
};

template <typename Held>
Held add(Held a, Held b) {
  if constexpr (std::is_integral_v<Held>) {
    using Unsigned = std::make_unsigned_t<Held>;
    return static_cast<Held>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b));
  } else {
    return a + b;
  }
}

/// Folds `inputs` over one run of elements that share an order.
template <typename T>
class Folder {
 public:
  using Ops = Arithmetic<T>;
  using Held = typename Ops::Held;

  /// inputs[r] holds rank r's elements from `origin` on.
  Folder(const ReduceOp& op, c10::ArrayRef<at::Tensor> inputs, int64_t origin)
      : op_(op), origin_(origin) {
    inputs_.reserve(inputs.size());
    for (const at::Tensor& input : inputs) inputs_.push_back(input.const_data_ptr<T>());
  }

  int size() const { return static_cast<int>(inputs_.size()); }

  /// Folds elements [begin, end) from rank `first` on, `step` ranks at a time, round the ring.
  void ring(int first, int step, int64_t begin, int64_t end, T* output) {
    const int n = size();
    blocks(begin, end, output, [&](int64_t at, int64_t count) {
      int rank = first;
      load(accumulators_[0].data(), rank, at, count);
      for (int i = 1; i < n; ++i) {
        rank = (rank + step + n) % n;
        combine_input(rank, at, count);
      }
    });
  }

  /// Folds elements [begin, end) pairwise.
  void tree(int64_t begin, int64_t end, T* output) {
    blocks(begin, end, output,
           [&](int64_t at, int64_t count) { subtree(0, size(), 0, at, count); });
  }

 private:
  using Block = std::array<Held, kBlock>;

  template <typename Fold>
  void blocks(int64_t begin, int64_t end, T* output, const Fold& fold) {
    if (accumulators_.empty()) accumulators_.resize(1);
    for (int64_t at = begin; at < end; at += kBlock) {
      const int64_t count = std::min(kBlock, end - at);
      fold(at, count);
      finish(output + (at - begin), count);
    }
  }

  void load(Held* to, int rank, int64_t at, int64_t count) const {
    const T* from = inputs_[rank] + (at - origin_);
    if (op_.kind == ReduceOp::Kind::kPremulSum) {
      const Held factor = static_cast<Held>(op_.factor);
      for (int64_t i = 0; i < count; ++i) to[i] = Ops::round(Ops::load(from[i]) * factor);
    } else {
      for (int64_t i = 0; i < count; ++i) to[i] = Ops::load(from[i]);
    }
  }

  /// accumulator 0 = accumulator 0 (op) rank's values.
  void combine_input(int rank, int64_t at, int64_t count) {
    Held* into = accumulators_[0].data();
    const T* from = inputs_[rank] + (at - origin_);
    if (op_.kind == ReduceOp::Kind::kPremulSum) {
      const Held factor = static_cast<Held>(op_.factor);
      for (int64_t i = 0; i < count; ++i) {
        into[i] = Ops::round(add(into[i], Ops::round(Ops::load(from[i]) * factor)));
      }
    } else {
      combine(into, from, count, [](T value) { return Ops::load(value); });
    }
  }

  template <typename From, typename Load>
  void combine(Held* into, const From* from, int64_t count, const Load& load) const {
    switch (op_.kind) {
      // A NaN wins over any number, in either order.
      case ReduceOp::Kind::kMin:
        for (int64_t i = 0; i < count; ++i) {
          const Held value = load(from[i]);
          into[i] = (value < into[i] || value != value) ? value : into[i];
        }
        break;
      case ReduceOp::Kind::kMax:
        for (int64_t i = 0; i < count; ++i) {
          const Held value = load(from[i]);
          into[i] = (value > into[i] || value != value) ? value : into[i];
        }
        break;
      default:
        for (int64_t i = 0; i < count; ++i) into[i] = Ops::round(add(into[i], load(from[i])));
    }
  }

  /// accumulators_[depth] = the fold of ranks [first, last).
  void subtree(int first, int last, size_t depth, int64_t at, int64_t count) {
    if (accumulators_.size() <= depth) accumulators_.resize(depth + 1);
    if (last - first == 1) return load(accumulators_[depth].data(), first, at, count);
    const int middle = first + (last - first + 1) / 2;
    subtree(first, middle, depth, at, count);
    subtree(middle, last, depth + 1, at, count);
    combine(accumulators_[depth].data(), accumulators_[depth + 1].data(), count,
            [](Held value) { return value; });
  }

  void finish(T* output, int64_t count) const {
    const Held* from = accumulators_[0].data();
    if (op_.kind == ReduceOp::Kind::kAvg) {
      const Held n = static_cast<Held>(size());
      for (int64_t i = 0; i < count; ++i) output[i] = Ops::store(Ops::round(from[i] / n));
    } else {
      for (int64_t i = 0; i < count; ++i) output[i] = Ops::store(from[i]);
    }
  }

  ReduceOp op_;
  int64_t origin_;
  std::vector<const T*> inputs_;
  std::vector<Block> accumulators_;
};

/// As NCCL reduces: an average is a sum of products with 1 / n (of which NCCL makes a float first,
/// but for doubles), and a factor is a value of the tensor's dtype.
template <typename T>
ReduceOp as_nccl_does(const ReduceOp& op, int n) {
  if constexpr (std::is_integral_v<T>) {
    return op;
  } else {
    if (op.kind != ReduceOp::Kind::kAvg && op.kind != ReduceOp::Kind::kPremulSum) return op;
    double factor = op.factor;
    if (op.kind == ReduceOp::Kind::kAvg) {
      factor =
          std::is_same_v<T, double> ? 1.0 / n : static_cast<double>(static_cast<float>(1.0 / n));
    }
    using Held = typename Arithmetic<T>::Held;
    return ReduceOp::premul_sum(Arithmetic<T>::round(static_cast<Held>(factor)));
  }
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

/// Elements of a chunk of Gloo's ring all-reduce over `numel` elements of `element_size` bytes by
/// `n` ranks: the buffer is cut into a multiple of n segments (at least two a rank, each at most
/// 1 MiB), and a chunk is a rank's share of the segments.
int64_t gloo_chunk(int64_t numel, int64_t element_size, int64_t n) {
  constexpr int64_t kMaxSegmentBytes = int64_t{1} << 20;
  const int64_t bytes = numel * element_size;
  const int64_t segments = round_up(std::max(ceil_div(bytes, kMaxSegmentBytes), 2 * n), n);
  const int64_t segment_bytes = round_up(ceil_div(bytes, segments), element_size);
  return segments / n * segment_bytes / element_size;
}

/// Calls fn(q, begin, end) for each chunk of `chunk` elements, q = 0, 1, ..., cut to [begin, end).
template <typename Fn>
void for_each_chunk(int64_t chunk, int64_t begin, int64_t end, const Fn& fn) {
  for (int64_t at = begin; at < end;) {
    const int64_t q = at / chunk;
    const int64_t stop = std::min(end, (q + 1) * chunk);
    fn(static_cast<int>(q), at, stop);
    at = stop;
  }
}

/// inputs[r] holds rank r's elements from `origin` on, of a buffer of `numel`.
template <typename T>
void reduce(ReductionOrder order, const ReduceOp& op, c10::ArrayRef<at::Tensor> inputs,
            int64_t numel, int64_t origin, int64_t begin, int64_t end, T* output) {
  const int n = static_cast<int>(inputs.size());
  Folder<T> folder(order == ReductionOrder::kNcclRing ? as_nccl_does<T>(op, n) : op, inputs,
                   origin);
  switch (order) {
    case ReductionOrder::kRankOrder:
      folder.ring(0, 1, begin, end, output);
      break;
    case ReductionOrder::kGlooRing:
      // Chunk q starts at rank q - 1 and travels downwards to rank q.
      for_each_chunk(gloo_chunk(numel, sizeof(T), n), begin, end,
                     [&](int q, int64_t from, int64_t to) {
                       folder.ring((q + n - 1) % n, -1, from, to, output + (from - begin));
                     });
      break;
    case ReductionOrder::kNcclRing:
      // Chunk q starts at rank q + 1 and travels upwards to rank q.
      for_each_chunk(ceil_div(numel, n), begin, end, [&](int q, int64_t from, int64_t to) {
        folder.ring((q + 1) % n, 1, from, to, output + (from - begin));
      });
      break;
    case ReductionOrder::kTree:
      folder.tree(begin, end, output);
      break;
  }
}

void check_inputs(const char* function, c10::ArrayRef<at::Tensor> inputs) {
  TORCH_CHECK(!inputs.empty(), function, ": no inputs");
  const at::Tensor& first = inputs[0];
  for (const at::Tensor& input : inputs) {
    TORCH_CHECK(input.is_contiguous() && input.device().is_cpu() &&
                    input.numel() == first.numel() && input.scalar_type() == first.scalar_type(),
                function, ": inputs must be contiguous CPU tensors of one size and dtype, got ",
                input.scalar_type(), input.sizes(), " on ", input.device(), " beside ",
                first.scalar_type(), first.sizes());
  }
}

void check_output(const char* function, const at::Tensor& input, int64_t numel,
                  const at::Tensor& output) {
  TORCH_CHECK(output.is_contiguous() && output.device().is_cpu() && output.numel() == numel &&
                  output.scalar_type() == input.scalar_type(),
              function, ": output must be a contiguous CPU tensor of ", numel, " ",
              input.scalar_type(), ", got ", output.scalar_type(), output.sizes(), " on ",
              output.device());
}

void dispatch(ReductionOrder order, const ReduceOp& op, c10::ArrayRef<at::Tensor> inputs,
              int64_t numel, int64_t origin, int64_t begin, int64_t end, const at::Tensor& output) {
  const auto run = [&]<typename T>(T) {
    reduce<T>(order, op, inputs, numel, origin, begin, end, output.mutable_data_ptr<T>());
  };
  switch (inputs[0].scalar_type()) {
    case at::kByte:
      return run(uint8_t{});
    case at::kChar:
      return run(int8_t{});
    case at::kShort:
      return run(int16_t{});
    case at::kInt:
      return run(int32_t{});
    case at::kLong:
      return run(int64_t{});
    case at::kHalf:
      return run(c10::Half{});
    case at::kBFloat16:
      return run(c10::BFloat16{});
    case at::kFloat:
      return run(float{});
    case at::kDouble:
      return run(double{});
    default:
      TORCH_CHECK(false, "cannot reduce ", inputs[0].scalar_type(), " tensors");
  }
}

}  // namespace

std::string to_string(ReductionOrder order) {
  for (const auto& [value, name] : kNames) {
    if (value == order) return name;
  }
  TORCH_INTERNAL_ASSERT(false, "unknown ReductionOrder ", static_cast<int>(order));
}

ReductionOrder parse_reduction_order(const std::string& name) {
  std::string names;
  for (const auto& [value, known] : kNames) {
    if (name == known) return value;
    names += names.empty() ? known : std::string(", ") + known;
  }
  TORCH_CHECK(false, "unknown reduction order '", name, "'; it is one of ", names);
}

void reduce_range(ReductionOrder order, const ReduceOp& op, c10::ArrayRef<at::Tensor> inputs,
                  int64_t begin, int64_t end, const at::Tensor& output) {
  check_inputs("reduce_range", inputs);
  TORCH_CHECK(0 <= begin && begin <= end && end <= inputs[0].numel(), "reduce_range: [", begin,
              ", ", end, ") is not within [0, ", inputs[0].numel(), ")");
  check_output("reduce_range", inputs[0], end - begin, output);
  dispatch(order, op, inputs, inputs[0].numel(), 0, begin, end, output);
}

void reduce_slices(ReductionOrder order, const ReduceOp& op, c10::ArrayRef<at::Tensor> slices,
                   int64_t total, int64_t begin, const at::Tensor& output) {
  check_inputs("reduce_slices", slices);
  const int64_t end = begin + slices[0].numel();
  TORCH_CHECK(0 <= begin && end <= total, "reduce_slices: [", begin, ", ", end,
              ") is not within [0, ", total, ")");
  check_output("reduce_slices", slices[0], end - begin, output);
  dispatch(order, op, slices, total, begin, begin, end, output);
}

}  // namespace ppfsdp::comm
