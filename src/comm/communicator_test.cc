// Every check of the communication interface fires before a backend is called, and says what to do.
#include "src/comm/communicator.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "src/comm/eager_stream.h"
#include "src/comm/runtime.h"
#include "src/comm/single_runtime.h"

namespace ppfsdp::comm {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Rank 1 of 4; remembers what reaches the backend.
class Recorder : public Communicator {
 public:
  explicit Recorder(std::string name = "shard", std::vector<int> ranks = {3, 5, 7, 9}, int rank = 1)
      : Communicator(std::move(name), std::move(ranks), rank) {}

  std::vector<std::string> calls;
  std::vector<uint64_t> sequences;
  std::vector<std::string> labels;
  bool fails = false;
  std::vector<int64_t> output_splits, input_splits;

 protected:
  void do_all_gather_into(const at::Tensor&, const at::Tensor&, Stream&) override {
    called("all_gather_into");
  }
  void do_reduce_scatter(const at::Tensor&, const at::Tensor&, const ReduceOp&, Stream&) override {
    called("reduce_scatter");
  }
  void do_all_reduce(const at::Tensor&, const ReduceOp&, Stream&) override { called("all_reduce"); }
  void do_broadcast(const at::Tensor&, int, Stream&) override { called("broadcast"); }
  void do_all_to_all(const at::Tensor&, const at::Tensor&, const std::vector<int64_t>& outputs,
                     const std::vector<int64_t>& inputs, Stream&) override {
    called("all_to_all");
    output_splits = outputs;
    input_splits = inputs;
  }
  void do_send(const at::Tensor&, int, Stream&) override { called("send"); }
  void do_recv(const at::Tensor&, int, Stream&) override { called("recv"); }
  void do_barrier() override { called("barrier"); }
  CommunicatorPtr do_subgroup(const std::vector<int>&, const std::string&) override {
    called("subgroup");
    return nullptr;
  }

 private:
  void called(const char* name) {
    calls.emplace_back(name);
    sequences.push_back(sequence());
    labels.emplace_back(label());
    if (fails) throw CommError(name);
  }
};

class CommunicatorTest : public ::testing::Test {
 protected:
  /// The message of the check that `call` trips; the backend must not have been reached.
  std::string refused(const std::function<void()>& call) {
    const size_t before = recorder.calls.size();
    std::string message = "(accepted)";
    try {
      call();
    } catch (const c10::Error& e) {
      message = e.what_without_backtrace();
    }
    EXPECT_EQ(recorder.calls.size(), before) << "the backend was called";
    return message;
  }

  Recorder recorder;
  EagerStream stream{"side"};
};

TEST_F(CommunicatorTest, knows_its_place) {
  EXPECT_EQ(recorder.rank(), 1);
  EXPECT_EQ(recorder.size(), 4);
  EXPECT_EQ(recorder.name(), "shard");
  EXPECT_THAT(recorder.ranks(), ElementsAre(3, 5, 7, 9));
  EXPECT_TRUE(recorder.device().is_cpu());
}

TEST_F(CommunicatorTest, counts_collectives_but_not_transfers) {
  // Two ranks that send must not get out of step with a third that does not.
  const at::Tensor one = at::zeros({2}), four = at::zeros({8});
  recorder.all_gather_into(four, one, stream);
  recorder.send(one, 0, stream);
  recorder.reduce_scatter(one, four, ReduceOp::sum(), stream);
  recorder.recv(one, 0, stream);
  recorder.all_reduce(one, ReduceOp::max(), stream);
  recorder.broadcast(one, 3, stream);
  recorder.all_to_all(four, four.clone(), {}, {}, stream);
  recorder.barrier();
  recorder.subgroup({1, 2}, "half");
  EXPECT_THAT(recorder.calls,
              ElementsAre("all_gather_into", "send", "reduce_scatter", "recv", "all_reduce",
                          "broadcast", "all_to_all", "barrier", "subgroup"));
  EXPECT_THAT(recorder.sequences, ElementsAre(0, 1, 1, 2, 2, 3, 4, 5, 6));
  EXPECT_EQ(recorder.sequence(), 7u);
}

TEST_F(CommunicatorTest, fills_equal_splits_in) {
  recorder.all_to_all(at::zeros({8}), at::zeros({4}), {}, {}, stream);
  EXPECT_THAT(recorder.output_splits, ElementsAre(2, 2, 2, 2));
  EXPECT_THAT(recorder.input_splits, ElementsAre(1, 1, 1, 1));
  recorder.all_to_all(at::zeros({8}), at::zeros({3}), {0, 0, 8, 0}, {1, 0, 1, 1}, stream);
  EXPECT_THAT(recorder.output_splits, ElementsAre(0, 0, 8, 0));
  EXPECT_THAT(recorder.input_splits, ElementsAre(1, 0, 1, 1));
}

TEST_F(CommunicatorTest, every_message_names_operation_group_and_rank) {
  const at::Tensor undefined;
  const at::Tensor good = at::zeros({4});
  const auto lead = [](const char* operation) {
    return std::string(operation) + " on group 'shard' (rank 1 of 4): ";
  };
  EXPECT_EQ(refused([&] { recorder.all_gather_into(undefined, good, stream); }),
            lead("all_gather_into") + "output is an undefined tensor");
  EXPECT_EQ(refused([&] { recorder.all_gather_into(good, undefined, stream); }),
            lead("all_gather_into") + "input is an undefined tensor");
  EXPECT_EQ(refused([&] { recorder.reduce_scatter(undefined, good, ReduceOp::sum(), stream); }),
            lead("reduce_scatter") + "output is an undefined tensor");
  EXPECT_EQ(refused([&] { recorder.reduce_scatter(good, undefined, ReduceOp::sum(), stream); }),
            lead("reduce_scatter") + "input is an undefined tensor");
  EXPECT_EQ(refused([&] { recorder.all_reduce(undefined, ReduceOp::sum(), stream); }),
            lead("all_reduce") + "tensor is an undefined tensor");
  EXPECT_EQ(refused([&] { recorder.broadcast(undefined, 0, stream); }),
            lead("broadcast") + "tensor is an undefined tensor");
  EXPECT_EQ(refused([&] { recorder.all_to_all(undefined, good, {}, {}, stream); }),
            lead("all_to_all") + "output is an undefined tensor");
  EXPECT_EQ(refused([&] { recorder.all_to_all(good, undefined, {}, {}, stream); }),
            lead("all_to_all") + "input is an undefined tensor");
  EXPECT_EQ(refused([&] { recorder.send(undefined, 0, stream); }),
            lead("send") + "tensor is an undefined tensor");
  EXPECT_EQ(refused([&] { recorder.recv(undefined, 0, stream); }),
            lead("recv") + "tensor is an undefined tensor");
}

TEST_F(CommunicatorTest, tensors_must_be_contiguous_dense_here_and_alive) {
  EXPECT_THAT(refused([&] {
                recorder.all_reduce(at::zeros({3, 2}).t(), ReduceOp::sum(), stream);
              }),
              HasSubstr("tensor must be contiguous, got Float[2, 3] with strides [1, 2]"));
  EXPECT_THAT(
      refused([&] { recorder.all_reduce(at::empty({2}, at::kMeta), ReduceOp::sum(), stream); }),
      HasSubstr("tensor must be on cpu, got Float[2] on meta"));
  EXPECT_THAT(refused([&] {
                recorder.all_reduce(at::zeros({2, 2}).to_sparse(), ReduceOp::sum(), stream);
              }),
              HasSubstr("tensor must be a dense tensor with memory of its own"));
  const at::Tensor freed = at::zeros({6});
  make_single_runtime()->free_storage(freed);
  EXPECT_THAT(refused([&] { recorder.all_reduce(freed, ReduceOp::sum(), stream); }),
              HasSubstr("tensor (Float[6]) needs 24 bytes, but its storage has 0: it was freed"));
}

TEST_F(CommunicatorTest, dtypes_must_agree) {
  EXPECT_THAT(
      refused([&] { recorder.all_gather_into(at::zeros({4}), at::zeros({1}, at::kHalf), stream); }),
      HasSubstr("output and input must have one dtype, got output Float[4] and input Half[1]"));
  EXPECT_THAT(refused([&] {
                recorder.reduce_scatter(at::zeros({1}, at::kLong), at::zeros({4}), ReduceOp::sum(),
                                        stream);
              }),
              HasSubstr("must have one dtype"));
  EXPECT_THAT(refused([&] {
                recorder.all_to_all(at::zeros({4}), at::zeros({4}, at::kLong), {}, {}, stream);
              }),
              HasSubstr("must have one dtype"));
}

TEST_F(CommunicatorTest, sizes_must_fit_the_group) {
  EXPECT_THAT(
      refused([&] {
        recorder.all_gather_into(at::zeros({2, 3}), at::zeros({2}), stream);
      }),
      HasSubstr("output.numel() must be 4 * input.numel() = 8, got 6 (output Float[2, 3], input "
                "Float[2])"));
  EXPECT_THAT(refused([&] {
                recorder.reduce_scatter(at::zeros({2}), at::zeros({9}), ReduceOp::sum(), stream);
              }),
              HasSubstr("input.numel() must be 4 * output.numel() = 8, got 9"));
}

TEST_F(CommunicatorTest, only_the_ranks_own_slot_may_be_shared) {
  const at::Tensor buffer = at::zeros({8});
  recorder.all_gather_into(buffer, buffer.narrow(0, 2, 2), stream);
  recorder.reduce_scatter(buffer.narrow(0, 2, 2), buffer, ReduceOp::sum(), stream);
  for (const int64_t start : {0, 1, 3, 4, 6}) {
    EXPECT_THAT(
        refused([&] { recorder.all_gather_into(buffer, buffer.narrow(0, start, 2), stream); }),
        HasSubstr("input overlaps output but is not its slot 1"));
    EXPECT_THAT(refused([&] {
                  recorder.reduce_scatter(buffer.narrow(0, start, 2), buffer, ReduceOp::sum(),
                                          stream);
                }),
                HasSubstr("output overlaps input but is not its slot 1"));
  }
  EXPECT_THAT(refused([&] {
                recorder.all_to_all(buffer.narrow(0, 0, 4), buffer.narrow(0, 3, 4), {}, {}, stream);
              }),
              HasSubstr("output and input must not overlap"));
  recorder.all_to_all(buffer.narrow(0, 0, 4), buffer.narrow(0, 4, 4), {}, {}, stream);
}

TEST_F(CommunicatorTest, reductions_take_numbers_and_averages_take_fractions) {
  for (const at::ScalarType dtype : {at::kBool, at::kComplexFloat, at::kFloat8_e4m3fn}) {
    const at::Tensor tensor = at::empty({4}, dtype);
    EXPECT_THAT(refused([&] { recorder.all_reduce(tensor, ReduceOp::sum(), stream); }),
                HasSubstr("cannot reduce"));
    EXPECT_THAT(refused([&] {
                  recorder.reduce_scatter(at::empty({1}, dtype), tensor, ReduceOp::max(), stream);
                }),
                HasSubstr("cannot reduce"));
    recorder.broadcast(tensor, 0, stream);
  }
  const at::Tensor integers = at::zeros({4}, at::kInt);
  EXPECT_THAT(refused([&] { recorder.all_reduce(integers, ReduceOp::avg(), stream); }),
              HasSubstr("avg needs a floating-point dtype, got Int"));
  EXPECT_THAT(refused([&] { recorder.all_reduce(integers, ReduceOp::premul_sum(0.5), stream); }),
              HasSubstr("premul_sum(0.5) needs a floating-point dtype, got Int"));
  for (const auto& op : {ReduceOp::sum(), ReduceOp::min(), ReduceOp::max()}) {
    recorder.all_reduce(integers, op, stream);
  }
}

TEST_F(CommunicatorTest, premul_factors_must_be_finite_and_not_negative) {
  const at::Tensor tensor = at::zeros({4});
  for (const double factor :
       {-0.5, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_THAT(refused([&] { recorder.all_reduce(tensor, ReduceOp::premul_sum(factor), stream); }),
                HasSubstr("the factor of premul_sum must be finite and not negative, got"));
  }
  recorder.all_reduce(tensor, ReduceOp::premul_sum(0.0), stream);
}

TEST_F(CommunicatorTest, roots_and_peers_must_be_in_the_group) {
  const at::Tensor tensor = at::zeros({4});
  for (const int root : {-1, 4, 9}) {
    EXPECT_THAT(refused([&] { recorder.broadcast(tensor, root, stream); }),
                HasSubstr("root must be in [0, 4), got " + std::to_string(root)));
  }
  for (const int peer : {-1, 1, 4}) {
    EXPECT_THAT(refused([&] { recorder.send(tensor, peer, stream); }),
                HasSubstr("peer must be another rank in [0, 4), got " + std::to_string(peer)));
    EXPECT_THAT(refused([&] { recorder.recv(tensor, peer, stream); }),
                HasSubstr("peer must be another rank in [0, 4), got " + std::to_string(peer)));
  }
}

TEST_F(CommunicatorTest, splits_must_cover_the_tensors) {
  const at::Tensor output = at::zeros({8}), input = at::zeros({6});
  EXPECT_THAT(refused([&] { recorder.all_to_all(output, input, {}, {}, stream); }),
              HasSubstr("input without splits must divide into 4 equal parts, got Float[6]"));
  EXPECT_THAT(refused([&] {
                recorder.all_to_all(output, input, {4, 4}, {3, 3, 0, 0}, stream);
              }),
              HasSubstr("output_splits must have one entry a rank, 4, got 2"));
  EXPECT_THAT(refused([&] {
                recorder.all_to_all(output, input, {9, -1, 0, 0}, {3, 3, 0, 0}, stream);
              }),
              HasSubstr("output_splits must not be negative"));
  EXPECT_THAT(refused([&] {
                recorder.all_to_all(output, input, {2, 2, 2, 2}, {3, 1, 1, 0}, stream);
              }),
              HasSubstr("input_splits [3, 1, 1, 0] sum to 5, but input (Float[6]) has 6 elements"));
}

TEST_F(CommunicatorTest, labels_last_for_one_call) {
  const at::Tensor one = at::zeros({1}), four = at::zeros({4});
  recorder.all_gather_into(four, one, stream, "gather");
  recorder.reduce_scatter(one, four, ReduceOp::sum(), stream, "scatter");
  recorder.all_reduce(one, ReduceOp::sum(), stream, "reduce");
  recorder.all_reduce(one, ReduceOp::sum(), stream);
  recorder.barrier();
  recorder.fails = true;
  EXPECT_THROW(recorder.all_reduce(one, ReduceOp::sum(), stream, "fails"), CommError);
  recorder.fails = false;
  recorder.broadcast(one, 0, stream);
  EXPECT_THAT(recorder.labels, ElementsAre("gather", "scatter", "reduce", "", "", "fails", ""));
}

TEST_F(CommunicatorTest, subgroups_are_ascending_members_with_this_rank) {
  EXPECT_THAT(refused([&] { recorder.subgroup({1, 2}, ""); }), HasSubstr("needs a name"));
  for (const auto& members :
       std::vector<std::vector<int>>{{2, 1}, {1, 1}, {-1, 1}, {1, 4}, {1, 2, 2}}) {
    EXPECT_THAT(refused([&] { recorder.subgroup(members, "x"); }),
                HasSubstr("members must be strictly ascending ranks in [0, 4), got ["));
  }
  EXPECT_THAT(refused([&] {
                recorder.subgroup({0, 2}, "x");
              }),
              HasSubstr("members must hold this rank, 1, got [0, 2]"));
  EXPECT_THAT(refused([&] { recorder.subgroup({}, "x"); }), HasSubstr("must hold this rank"));
}

TEST_F(CommunicatorTest, a_rank_outside_its_group_is_refused) {
  EXPECT_EQ(refused([] {
              Recorder outside("g", {0, 1}, 2);
            }),
            "Communicator 'g': rank must be in [0, 2), got 2");
}

}  // namespace
}  // namespace ppfsdp::comm
