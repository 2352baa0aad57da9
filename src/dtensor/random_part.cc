#include "src/dtensor/random_part.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <c10/util/SmallVector.h>
#include <c10/util/complex.h>

#include <algorithm>
#include <cstring>
#include <mutex>

#include "src/dtensor/philox_cuda.h"
#include "src/dtensor/philox_indexed.h"
#include "src/dtensor/random.h"
#include "src/dtensor/random_skip.h"
#include "src/dtensor/sharding.h"

namespace ppfsdp::dtensor {
namespace {

/// The groups of normal_.
constexpr int64_t kGroup = 16;
/// Elements drawn at once: long beside the cost of a call, short beside the caches.
constexpr int64_t kBlock = int64_t{1} << 15;
/// Gaps of fewer elements are drawn, not skipped.
constexpr int64_t kLeastSkip = 1024;

bool is_contiguous(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  int64_t dense = 1;
  for (size_t dim = sizes.size(); dim-- > 0;) {
    if (sizes[dim] != 1) {
      if (strides[dim] != dense) {
        return false;
      }
      dense *= sizes[dim];
    }
  }
  return true;
}

template <typename T>
void copy_elements(const void* from, int64_t from_stride, void* to, int64_t to_stride,
                   int64_t count) {
  const T* source = static_cast<const T*>(from);
  T* target = static_cast<T*>(to);
  if (from_stride == 1 && to_stride == 1) {
    std::memcpy(target, source, static_cast<size_t>(count) * sizeof(T));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    target[i * to_stride] = source[i * from_stride];
  }
}

using CopyElements = void (*)(const void*, int64_t, void*, int64_t, int64_t);

CopyElements copy_for(size_t itemsize) {
  switch (itemsize) {
    case 1:
      return &copy_elements<uint8_t>;
    case 2:
      return &copy_elements<uint16_t>;
    case 4:
      return &copy_elements<uint32_t>;
    case 8:
      return &copy_elements<uint64_t>;
    default:
      TORCH_INTERNAL_ASSERT(itemsize == sizeof(c10::complex<double>), "elements of ", itemsize,
                            " bytes");
      return &copy_elements<c10::complex<double>>;
  }
}

at::CPUGeneratorImpl& cpu_impl(const at::Generator& generator) {
  return *generator.get<at::CPUGeneratorImpl>();
}

}  // namespace

/// The part as runs of elements that follow each other in the whole, in order.
class RandomPart::Runs {
 public:
  Runs(const RandomPart& part, c10::IntArrayRef local_strides) : done_(part.holds_none_) {
    for (const Dim& dim : part.order_) {
      const Level level{dim.size, dim.range.offset, dim.range.length, local_strides[dim.dim]};
      if (!levels_.empty() && level.length == level.size &&
          (levels_.back().length == 1 || levels_.back().stride == level.stride * level.size)) {
        Level& outer = levels_.back();
        outer.size *= level.size;
        outer.offset *= level.size;
        outer.length *= level.size;
        outer.stride = level.stride;
      } else {
        levels_.push_back(level);
      }
    }
    if (levels_.empty()) {
      levels_.push_back({1, 0, 1, 1});
    }
    index_.assign(levels_.size() - 1, 0);
    find();
  }

  bool done() const { return done_; }
  /// Of the run's elements in the whole.
  int64_t begin() const { return begin_; }
  int64_t end() const { return begin_ + levels_.back().length; }
  /// Where its first element is in the local tensor, and from there on the others.
  int64_t local() const { return local_; }
  int64_t local_stride() const { return levels_.back().stride; }

  /// How many runs, from this one on, follow each other at one distance; and that distance in the
  /// whole and in the local tensor.
  int64_t repeats() const {
    return index_.empty() ? 1 : levels_[index_.size() - 1].length - index_.back();
  }
  int64_t distance() const { return levels_.back().size; }
  int64_t local_distance() const { return index_.empty() ? 0 : levels_[index_.size() - 1].stride; }

  void next() {
    for (size_t k = index_.size(); k-- > 0;) {
      if (++index_[k] < levels_[k].length) {
        find();
        return;
      }
      index_[k] = 0;
    }
    done_ = true;
  }

 private:
  struct Level {
    int64_t size;
    int64_t offset;
    int64_t length;
    int64_t stride;  // in the local tensor
  };

  void find() {
    begin_ = 0;
    local_ = 0;
    for (size_t k = 0; k < index_.size(); ++k) {
      begin_ = begin_ * levels_[k].size + levels_[k].offset + index_[k];
      local_ += index_[k] * levels_[k].stride;
    }
    begin_ = begin_ * levels_.back().size + levels_.back().offset;
  }

  c10::SmallVector<Level, 4> levels_;
  c10::SmallVector<int64_t, 4> index_;  // in all levels but the last
  bool done_;
  int64_t begin_ = 0;
  int64_t local_ = 0;
};

/// One draw: the whole's elements in order, those that this rank holds kept, long gaps skipped.
class RandomPart::Walk {
 public:
  Walk(const RandomPart& part, const at::Tensor& local, const RandomOp& op)
      : part_(part),
        op_(op),
        runs_(part, local.strides()),
        local_(static_cast<char*>(local.mutable_data_ptr())),
        itemsize_(local.itemsize()),
        copy_(copy_for(local.itemsize())) {
    // ATen draws normal values otherwise for tensors that are not contiguous, as the whole may be.
    const int64_t length = std::min(part.numel_, kBlock);
    const at::TensorOptions options = local.options();
    scratch_ = part.contiguous_ ? at::empty({length}, options)
                                : at::empty({length, 2}, options).select(1, 0);
    from_ = static_cast<const char*>(scratch_.const_data_ptr());
    from_stride_ = part.contiguous_ ? 1 : 2;
  }

  void run(const at::Generator& generator) {
    const int64_t numel = part_.numel_;
    const int64_t tail = numel <= kBlock ? numel : kGroup + numel % kGroup;
    const int64_t body = numel - tail;
    int64_t at = 0;
    while (at < body) {
      const int64_t held = runs_.done() ? body : std::min(runs_.begin(), body);
      const int64_t gap = (held - at) / kGroup * kGroup;
      if (gap >= kLeastSkip) {
        skip(gap, generator);
        at += gap;
      } else {
        const int64_t length = block_length(at, body);
        draw(at, length, generator);
        at += length;
      }
    }
    draw(body, tail, generator);
  }

 private:
  /// To the next long gap, at most a block.
  int64_t block_length(int64_t at, int64_t body) const {
    const int64_t limit = std::min(kBlock, body - at);
    int64_t end = at;
    for (Runs ahead = runs_; !ahead.done() && end < at + limit && ahead.begin() - end < kLeastSkip;
         ahead.next()) {
      end = ahead.end();
    }
    const int64_t wanted = (end - at + kGroup - 1) / kGroup * kGroup;
    return wanted == 0 ? limit : std::min(wanted, limit);
  }

  void draw(int64_t at, int64_t length, const at::Generator& generator) {
    op_.fill(piece(length), generator);
    for (; !runs_.done() && runs_.begin() < at + length; runs_.next()) {
      const int64_t begin = std::max(runs_.begin(), at);
      const int64_t end = std::min(runs_.end(), at + length);
      const int64_t to = runs_.local() + (begin - runs_.begin()) * runs_.local_stride();
      copy_(from_ + (begin - at) * from_stride_ * itemsize_, from_stride_, local_ + to * itemsize_,
            runs_.local_stride(), end - begin);
      if (runs_.end() > at + length) {
        return;  // the rest is in the next block
      }
    }
  }

  /// `count` is a multiple of kGroup.
  void skip(int64_t count, const at::Generator& generator) {
    if (draws_a_group_ == 0) {
      draws_a_group_ = count_draws(generator);
    }
    at::CPUGeneratorImpl& impl = cpu_impl(generator);
    at::mt19937 engine = impl.engine();
    at::mt19937_data_pod state = engine.data();
    skip_draws(state, static_cast<uint64_t>(count / kGroup - 1) * draws_a_group_);
    engine.set_data(state);
    impl.set_engine(engine);
    // The last group is drawn: it leaves in the generator what a later value needs.
    op_.fill(piece(kGroup), generator);
  }

  /// How many 32-bit draws a group takes, as the op itself does it.
  uint64_t count_draws(const at::Generator& generator) {
    const at::Generator copy = generator.clone();
    const int before = cpu_impl(copy).engine().data().left_;
    op_.fill(piece(kGroup), copy);
    const int after = cpu_impl(copy).engine().data().left_;
    // No op takes as many as the state has.
    return static_cast<uint64_t>((before - after + at::MERSENNE_STATE_N) % at::MERSENNE_STATE_N);
  }

  at::Tensor piece(int64_t length) const {
    return length == scratch_.size(0) ? scratch_ : scratch_.narrow(0, 0, length);
  }

  const RandomPart& part_;
  const RandomOp& op_;
  Runs runs_;
  char* local_;
  int64_t itemsize_;
  CopyElements copy_;
  at::Tensor scratch_;
  const char* from_;
  int64_t from_stride_;
  uint64_t draws_a_group_ = 0;
};

RandomPart::RandomPart(const char* function, const mesh::DeviceMesh& mesh,
                       const Placements& placements, std::vector<int64_t> sizes,
                       std::vector<int64_t> strides)
    : sizes_(std::move(sizes)), strides_(std::move(strides)) {
  for (const Placement& placement : placements) {
    TORCH_CHECK(!placement.is_partial(), function, ": a DTensor of placements ",
                to_string(placements),
                " holds values that are yet to be reduced, into which nothing can be drawn; "
                "redistribute it to Replicate() or Shard(dim) first");
  }
  ranges_ = local_ranges(sizes_, mesh, placements, mesh.coordinates());
  contiguous_ = is_contiguous(sizes_, strides_);
  for (size_t dim = 0; dim < sizes_.size(); ++dim) {
    numel_ *= sizes_[dim];
    holds_none_ = holds_none_ || ranges_[dim].length == 0;
    if (sizes_[dim] > 1) {
      TORCH_CHECK(strides_[dim] != 0, function, ": dim ", dim, " of a DTensor of sizes ",
                  c10::IntArrayRef(sizes_),
                  " is expanded: its elements share memory; clone() it "
                  "first");
      order_.push_back({static_cast<int64_t>(dim), sizes_[dim], ranges_[dim]});
    }
  }
  std::stable_sort(order_.begin(), order_.end(),
                   [&](const Dim& a, const Dim& b) { return strides_[a.dim] > strides_[b.dim]; });
}

bool RandomPart::is_whole(const at::Tensor& local) const {
  return local.sizes() == c10::IntArrayRef(sizes_) && local.strides() == c10::IntArrayRef(strides_);
}

void RandomPart::draw(const at::Tensor& local, const RandomOp& op, at::Generator generator,
                      const comm::Runtime& runtime) const {
  if (const std::optional<IndexedDraw> indexed = IndexedDraw::take()) {
    TORCH_CHECK(op.distribution, op.name,
                ": has no values by element index; end the IndexedRandomGuard's lifetime first, or "
                "use uniform_, normal_, bernoulli_, exponential_ or random_");
    fill_indexed(local, sizes_, ranges_, *op.distribution, indexed->seed, indexed->draw);
    return;
  }
  // Of no elements nothing is drawn, but the op's arguments are checked. On meta, as a plain tensor
  // on meta, nothing is drawn either.
  if (numel_ == 0 || local.is_meta() || is_whole(local)) {
    op.fill(local, generator);
    return;
  }
  if (!local.is_cpu()) {
    draw_by_windows(local, op, std::move(generator), runtime.device_grid());
    return;
  }
  TORCH_CHECK(generator.device().is_cpu(), op.name,
              ": a tensor on the CPU needs a generator on it, "
              "got one on ",
              generator.device());
  Walk walk(*this, local, op);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  // The ops lock the generator that they are given, so they are given a copy.
  const at::Generator copy = generator.clone();
  walk.run(copy);
  at::CPUGeneratorImpl& from = cpu_impl(copy);
  at::CPUGeneratorImpl& to = cpu_impl(generator);
  to.set_engine(from.engine());
  to.set_next_float_normal_sample(from.next_float_normal_sample());
  to.set_next_double_normal_sample(from.next_double_normal_sample());
}

void RandomPart::draw_by_windows(const at::Tensor& local, const RandomOp& op,
                                 at::Generator generator, const comm::DeviceGrid& grid) const {
  TORCH_CHECK_NOT_IMPLEMENTED(
      op.distribution && !local.is_complex(), op.name, ": of a ", local.scalar_type(),
      " tensor a part is drawn on ", local.device(),
      " for uniform_, normal_, bernoulli_(p), exponential_ and random_ of real numbers alone; draw "
      "it on the CPU and copy it");
  TORCH_CHECK(generator.device().type() == local.device().type(), op.name, ": a tensor on ",
              local.device(), " needs a generator on it, got one on ", generator.device());
  const PhiloxLayout layout = philox_layout(*op.distribution, local.scalar_type(), numel_, grid);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  const uint64_t offset = generator.get_offset();
  if (!holds_none_) {
    Runs runs(*this, local.strides());
    const int64_t first = runs.begin();
    int64_t last = 0;
    for (const Dim& dim : order_) {
      last = last * dim.size + dim.range.offset + dim.range.length - 1;
    }
    // The ops lock the generator that they are given, so they are given a copy.
    at::Generator copy = generator.clone();
    const std::vector<PhiloxWindow> windows = layout.windows(first, last + 1 - first, offset);
    for (size_t i = 0; i < windows.size(); ++i) {
      const PhiloxWindow& window = windows[i];
      // A window may be longer than what it holds.
      const int64_t end = i + 1 < windows.size() ? windows[i + 1].first : last + 1;
      if (runs.done() || runs.begin() >= end) {
        continue;  // other ranks' elements
      }
      const at::Tensor scratch = at::empty({window.numel}, local.options());
      copy.set_offset(window.offset);
      op.fill(scratch, copy);
      copy_runs(scratch, window.first, end, runs, local);
    }
  }
  generator.set_offset(offset + layout.offset_increment());
}

/// Copies what the whole has from `first`, where `values` begin, to `end`, and moves on to the run
/// that has more behind it.
void RandomPart::copy_runs(const at::Tensor& values, int64_t first, int64_t end, Runs& runs,
                           const at::Tensor& local) {
  while (!runs.done() && runs.begin() < end) {
    const int64_t begin = std::max(runs.begin(), first);
    const int64_t length = std::min(runs.end(), end) - begin;
    int64_t count = 1;
    if (begin == runs.begin() && runs.end() <= end) {
      // Rows of a part of each row, say, are one strided copy.
      count = std::min(runs.repeats(), (end - runs.end()) / runs.distance() + 1);
    }
    const int64_t to = runs.local() + (begin - runs.begin()) * runs.local_stride();
    local
        .as_strided({count, length}, {runs.local_distance(), runs.local_stride()},
                    local.storage_offset() + to)
        .copy_(values.as_strided({count, length}, {runs.distance(), 1}, begin - first));
    if (runs.end() > end) {
      return;
    }
    for (int64_t i = 0; i < count; ++i) {
      runs.next();
    }
  }
}

}  // namespace ppfsdp::dtensor
