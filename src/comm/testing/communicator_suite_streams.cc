// What the suite asks of streams.
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <stdexcept>
#include <vector>

#include "src/comm/testing/communicator_suite.h"
#include "src/comm/testing/suite_util.h"

namespace ppfsdp::comm::testing {

TEST_P(CommunicatorSuite, AStreamRunsItsWorkInOrder) {
  run([&](Runtime& runtime) {
    const int rank = runtime.rank();
    const auto stream = runtime.create_stream("work", StreamPriority::kNormal);
    const at::Tensor source = here(runtime, at::full({4}, 1.0 + rank));
    const at::Tensor buffer = here(runtime, at::zeros({4 * size()}));
    const at::Tensor slot = buffer.narrow(0, rank * 4, 4);
    const at::Tensor result = here(runtime, at::zeros({4 * size()}));
    const at::Tensor sum = here(runtime, at::zeros({}));
    std::vector<int> order;
    begin(runtime, *stream);
    // As FSDP does: copy in, gather, copy out; then a reduction of what came out.
    stream->run([&] {
      order.push_back(0);
      slot.copy_(source);
    });
    runtime.world()->all_gather_into(buffer, slot, *stream);
    stream->run([&] {
      order.push_back(1);
      result.copy_(buffer);
      sum.copy_(result.sum());
    });
    runtime.world()->all_reduce(sum, ReduceOp::sum(), *stream);
    stream->run([&] {
      order.push_back(2);
      sum.mul_(2);
    });
    finish(runtime, *stream);
    const int n = size();
    EXPECT_EQ(order, (std::vector<int>{0, 1, 2}));
    for (int r = 0; r < n; ++r) EXPECT_EQ(result[4 * r].item<float>(), 1.0f + r);
    EXPECT_EQ(sum.item<float>(), 2.0f * n * 4.0f * static_cast<float>(n * (n + 1) / 2));
  });
}

TEST_P(CommunicatorSuite, AStreamWaitsForAnothersEvent) {
  run([&](Runtime& runtime) {
    const auto first = runtime.create_stream("first", StreamPriority::kNormal);
    const auto second = runtime.create_stream("second", StreamPriority::kNormal);
    const at::Tensor tensor = here(runtime, at::full({1000}, 1.0));
    begin(runtime, *first);
    runtime.world()->all_reduce(tensor, ReduceOp::sum(), *first);
    const EventPtr reduced_event = first->record();
    // Behind the event on the first stream; the second must not wait for it.
    const at::Tensor later = here(runtime, at::zeros({1}));
    begin(runtime, *first);
    runtime.world()->all_reduce(later, ReduceOp::sum(), *first);
    second->wait(reduced_event);
    second->wait(nullptr);
    second->run([&] { tensor.add_(1); });
    runtime.world()->all_reduce(tensor, ReduceOp::avg(), *second);
    const EventPtr done = second->record();
    done->synchronize();
    done->synchronize();
    EXPECT_EQ(tensor[0].item<float>(), size() + 1.0f);
    EXPECT_EQ(tensor[999].item<float>(), size() + 1.0f);
    first->synchronize();
    second->synchronize();
  });
}

TEST_P(CommunicatorSuite, OperationsOnSeveralStreamsMayEndInAnyOrder) {
  run([&](Runtime& runtime) {
    const int n = size();
    const int rank = runtime.rank();
    const auto a = runtime.create_stream("a", StreamPriority::kNormal);
    const auto b = runtime.create_stream("b", StreamPriority::kNormal);
    std::vector<at::Tensor> gathered;
    std::vector<EventPtr> events;
    for (int i = 0; i < 6; ++i) {
      Stream& stream = i % 2 == 0 ? *a : *b;
      const at::Tensor output = here(runtime, at::zeros({n * 50}));
      const at::Tensor input = here(runtime, at::full({50}, 10.0 * i + rank));
      begin(runtime, stream);
      // The closure owns the output; the input is dropped here and must live on.
      runtime.world()->all_gather_into(output, input, stream);
      stream.run([output] { output.add_(0.5); });
      gathered.push_back(output);
      events.push_back(stream.record());
    }
    for (int i = 5; i >= 0; --i) {
      runtime.compute_stream().wait(events[i]);
      for (int r = 0; r < n; ++r) {
        EXPECT_EQ(gathered[i][r * 50 + 49].item<float>(), 10.0f * i + r + 0.5f);
      }
    }
  });
}

TEST_P(CommunicatorSuite, RanksMayWaitForStreamsInDifferentOrders) {
  // While a rank waits for one stream, what the others hold must go on: a peer waits for it.
  run([&](Runtime& runtime) {
    const auto a = runtime.create_stream("a", StreamPriority::kNormal);
    const auto b = runtime.create_stream("b", StreamPriority::kNormal);
    for (int round = 0; round < 3; ++round) {
      const at::Tensor x = here(runtime, at::full({100}, 1.0));
      const at::Tensor y = here(runtime, at::full({100}, 2.0));
      begin(runtime, *a);
      begin(runtime, *b);
      for (int i = 0; i < 3; ++i) {
        runtime.world()->all_reduce(x, ReduceOp::avg(), *a);
        a->run([&] { x.add_(1); });
        runtime.world()->all_reduce(y, ReduceOp::avg(), *b);
        b->run([&] { y.add_(1); });
      }
      const bool a_first = (runtime.rank() + round) % 2 == 0;
      (a_first ? a : b)->synchronize();
      if (round == 1) runtime.world()->barrier();
      (a_first ? b : a)->synchronize();
      if (round == 2) runtime.world()->barrier();
      EXPECT_EQ(x[99].item<float>(), 4.0f);
      EXPECT_EQ(y[99].item<float>(), 5.0f);
    }
  });
}

TEST_P(CommunicatorSuite, OperationsOnTheComputeStreamAreDoneInProgramOrder) {
  run([&](Runtime& runtime) {
    Stream& compute = runtime.compute_stream();
    const at::Tensor tensor = here(runtime, at::full({3}, 1.0 + runtime.rank()));
    runtime.world()->all_reduce(tensor, ReduceOp::max(), compute);
    compute.synchronize();
    EXPECT_EQ(tensor[0].item<float>(), static_cast<float>(size()));
    compute.run([&] { tensor.neg_(); });
    compute.synchronize();
    EXPECT_EQ(tensor[0].item<float>(), -static_cast<float>(size()));
  });
}

TEST_P(CommunicatorSuite, AnErrorInAClosureIsThrownToWhoeverWaitsForIt) {
  run([&](Runtime& runtime) {
    const auto stream = runtime.create_stream("work", StreamPriority::kNormal);
    const at::Tensor tensor = here(runtime, at::full({3}, 1.0));
    begin(runtime, *stream);
    runtime.world()->all_reduce(tensor, ReduceOp::sum(), *stream);
    const auto queue_and_wait = [&] {
      stream->run([] { throw std::runtime_error("closure failed"); });
      stream->synchronize();
    };
    EXPECT_THROW(queue_and_wait(), std::runtime_error);
    runtime.world()->barrier();
  });
}

}  // namespace ppfsdp::comm::testing
