// Streams of the simulated mesh really run later, in any order that events allow, so that what is
// missing shows.
#include "sim/mesh/sim_stream.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "sim/mesh/world.h"
#include "src/comm/communicator.h"
#include "src/comm/eager_stream.h"

namespace ppfsdp::sim {
namespace {

using comm::EventPtr;
using comm::Runtime;
using comm::StreamPriority;

constexpr Schedule kSchedules[] = {Schedule::kRoundRobin, Schedule::kRandom, Schedule::kLazy};

std::shared_ptr<comm::Stream> side(Runtime& runtime, const char* name = "side") {
  return runtime.create_stream(name, StreamPriority::kNormal);
}

std::string failure_of(const std::function<void(Runtime&)>& fn) {
  try {
    run_world(1, {.schedule = Schedule::kLazy}, fn);
  } catch (const c10::Error& e) {
    return e.what_without_backtrace();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "(no failure)";
}

TEST(SideStream, runs_later_and_in_order) {
  run_world(1, {.schedule = Schedule::kLazy}, [](Runtime& runtime) {
    const auto stream = side(runtime);
    std::vector<int> ran;
    for (int i = 0; i < 5; ++i) stream->run([&ran, i] { ran.push_back(i); });
    EXPECT_TRUE(ran.empty());
    stream->synchronize();
    EXPECT_EQ(ran, (std::vector<int>{0, 1, 2, 3, 4}));
  });
}

TEST(SideStream, runs_under_the_grad_mode_of_the_call) {
  for (const Schedule schedule : kSchedules) {
    run_world(3, {.seed = 2, .schedule = schedule}, [](Runtime& runtime) {
      const auto stream = side(runtime);
      std::vector<bool> modes;
      stream->run([&] { modes.push_back(at::GradMode::is_enabled()); });
      {
        const at::NoGradGuard no_grad;
        stream->run([&] { modes.push_back(at::GradMode::is_enabled()); });
      }
      stream->run([&] { modes.push_back(at::GradMode::is_enabled()); });
      const at::NoGradGuard no_grad;
      stream->synchronize();
      EXPECT_EQ(modes, (std::vector<bool>{true, false, true}));
      EXPECT_FALSE(at::GradMode::is_enabled());
    });
  }
}

TEST(SideStream, releases_what_a_closure_captured_when_it_has_run) {
  run_world(1, {}, [](Runtime& runtime) {
    const auto stream = side(runtime);
    auto held = std::make_shared<int>(1);
    const std::weak_ptr<int> watched = held;
    stream->run([held] {});
    held.reset();
    stream->synchronize();
    EXPECT_TRUE(watched.expired());
  });
}

TEST(SideStream, events_order_streams) {
  // b waits for the first half of a only.
  for (uint64_t seed = 0; seed < 50; ++seed) {
    run_world(2, {.seed = seed, .schedule = Schedule::kRandom}, [](Runtime& runtime) {
      const auto a = side(runtime, "a"), b = side(runtime, "b");
      std::string ran;
      a->run([&] { ran += "1"; });
      const EventPtr half = a->record();
      a->run([&] { ran += "2"; });
      b->wait(half);
      b->wait(nullptr);
      b->run([&] { ran += "3"; });
      a->synchronize();
      b->synchronize();
      EXPECT_LT(ran.find('1'), ran.find('2'));
      EXPECT_LT(ran.find('1'), ran.find('3'));
      EXPECT_EQ(ran.size(), 3u);
    });
  }
}

TEST(SideStream, streams_overtake_one_another_where_no_event_orders_them) {
  int first_a = 0, first_b = 0;
  for (uint64_t seed = 0; seed < 50; ++seed) {
    run_world(1, {.seed = seed, .schedule = Schedule::kRandom}, [&](Runtime& runtime) {
      const auto a = side(runtime, "a"), b = side(runtime, "b");
      std::string ran;
      a->run([&] { ran += "a"; });
      b->run([&] { ran += "b"; });
      a->synchronize();
      b->synchronize();
      ++(ran == "ab" ? first_a : first_b);
    });
  }
  EXPECT_GT(first_a, 5);
  EXPECT_GT(first_b, 5);
}

TEST(ComputeStream, runs_at_once_and_waits_for_side_streams) {
  for (const Schedule schedule : kSchedules) {
    run_world(2, {.schedule = schedule}, [](Runtime& runtime) {
      comm::Stream& compute = runtime.compute_stream();
      int value = 0;
      compute.run([&] { value = 1; });
      EXPECT_EQ(value, 1);
      compute.record()->synchronize();
      compute.synchronize();
      const auto stream = side(runtime);
      stream->wait(compute.record());
      stream->run([&] { value = 2; });
      compute.wait(nullptr);
      compute.wait(stream->record());
      EXPECT_EQ(value, 2);
    });
  }
}

TEST(SideStream, an_error_is_thrown_by_every_wait_and_stops_what_comes_behind) {
  run_world(1, {}, [](Runtime& runtime) {
    const auto stream = side(runtime), other = side(runtime, "other");
    bool behind = false, ahead = false, other_ran = false;
    stream->run([&] { ahead = true; });
    const EventPtr before = stream->record();
    stream->run([] { throw std::out_of_range("bad index"); });
    stream->run([&] { behind = true; });
    const EventPtr after = stream->record();
    other->wait(after);
    other->run([&] { other_ran = true; });
    before->synchronize();
    EXPECT_TRUE(ahead);
    EXPECT_THROW(after->synchronize(), std::out_of_range);
    EXPECT_THROW(runtime.compute_stream().wait(after), std::out_of_range);
    EXPECT_THROW(stream->synchronize(), std::out_of_range);
    EXPECT_THROW(other->synchronize(), std::out_of_range);
    EXPECT_FALSE(behind);
    EXPECT_FALSE(other_ran);
  });
}

TEST(SideStream, an_error_that_nobody_waits_for_is_the_ranks) {
  EXPECT_EQ(failure_of([](Runtime& runtime) {
              side(runtime)->run([] { throw std::out_of_range("bad index"); });
            }),
            "rank 0: bad index");
  // Behind it a collective would leave the others waiting for ever.
  std::string what;
  try {
    run_world(3, {}, [](Runtime& runtime) {
      const auto stream = side(runtime);
      if (runtime.rank() == 1) stream->run([] { throw std::out_of_range("bad index"); });
      runtime.world()->all_reduce(at::ones({2}), comm::ReduceOp::sum(), *stream);
      stream->synchronize();
    });
  } catch (const std::exception& e) {
    what = e.what();
  }
  EXPECT_EQ(what, "rank 1: bad index");
}

TEST(SideStream, closures_do_not_communicate) {
  EXPECT_NE(failure_of([](Runtime& runtime) {
              const auto stream = side(runtime);
              stream->run([&] { runtime.world()->barrier(); });
              stream->synchronize();
            }).find("barrier of rank 0: called from a closure that a stream runs"),
            std::string::npos);
  EXPECT_NE(failure_of([](Runtime& runtime) {
              const auto stream = side(runtime);
              stream->run([&] { stream->run([] {}); });
              stream->synchronize();
            }).find("Stream::run of rank 0: called from a closure"),
            std::string::npos);
}

TEST(SideStream, closures_may_free_and_allocate) {
  run_world(2, {}, [](Runtime& runtime) {
    const auto stream = side(runtime);
    const at::Tensor tensor = at::ones({4});
    stream->run([&runtime, tensor] {
      runtime.free_storage(tensor);
      runtime.alloc_storage(tensor);
    });
    stream->synchronize();
    EXPECT_TRUE(tensor.isnan().all().item<bool>());
  });
}

TEST(SideStream, refuses_events_of_others) {
  EventPtr of_rank_0;
  EXPECT_THROW(run_world(2, {},
                         [&](Runtime& runtime) {
                           const auto stream = side(runtime);
                           if (runtime.rank() == 0) of_rank_0 = stream->record();
                           runtime.world()->barrier();
                           if (runtime.rank() == 1) stream->wait(of_rank_0);
                         }),
               c10::Error);
  EXPECT_NE(failure_of([](Runtime& runtime) {
              comm::EagerStream foreign("foreign");
              side(runtime)->wait(foreign.record());
            }).find("the event is not one of the simulated mesh"),
            std::string::npos);
}

TEST(FreeStorage, a_reader_that_comes_too_late_sees_nan) {
  for (const bool own : {true, false}) {
    run_world(1, {.schedule = Schedule::kLazy}, [&](Runtime& runtime) {
      const auto stream = side(runtime);
      const at::Tensor tensor = at::ones({4});
      const at::Tensor view = tensor.narrow(0, 1, 2);
      const at::Tensor copy = at::zeros({2});
      stream->run([=] { copy.copy_(view); });
      if (own) stream->synchronize();
      runtime.free_storage(tensor);
      stream->synchronize();
      EXPECT_EQ(copy.isnan().any().item<bool>(), !own);
    });
  }
}

TEST(FreeStorage, comes_back_as_nan_and_keeps_the_version) {
  run_world(1, {}, [](Runtime& runtime) {
    const at::Tensor tensor = at::ones({4});
    const auto version = tensor.unsafeGetTensorImpl()->version_counter().current_version();
    runtime.free_storage(tensor);
    EXPECT_TRUE(tensor.isnan().all().item<bool>());
    runtime.alloc_storage(tensor);
    EXPECT_TRUE(tensor.isnan().all().item<bool>());
    EXPECT_EQ(tensor.unsafeGetTensorImpl()->version_counter().current_version(), version);
    // A storage that has no memory yet.
    const at::Tensor never = at::empty({6});
    static_cast<comm::Runtime&>(runtime).comm::Runtime::free_storage(never);
    EXPECT_EQ(never.storage().nbytes(), 0u);
    runtime.alloc_storage(never);
    EXPECT_TRUE(never.isnan().all().item<bool>());
  });
}

// A stray write must neither crash nor reach what others freed.
TEST(FreeStorage, a_write_to_what_was_freed_stays_there) {
  run_world(1, {}, [](Runtime& runtime) {
    const at::Tensor a = at::ones({4}), b = at::ones({4});
    runtime.free_storage(a);
    runtime.free_storage(b);
    a.fill_(3);
    EXPECT_TRUE(b.isnan().all().item<bool>());
    runtime.alloc_storage(b);
    EXPECT_TRUE(b.isnan().all().item<bool>());
  });
}

// Parameters are freed as bytes, whatever their dtype.
TEST(FreeStorage, is_nan_for_every_view) {
  run_world(1, {}, [](Runtime& runtime) {
    const at::Tensor bytes = at::zeros({64}, at::kByte);
    const at::Tensor half = bytes.view(at::kBFloat16), single = bytes.view(at::kFloat);
    runtime.free_storage(bytes);
    EXPECT_TRUE(half.isnan().all().item<bool>());
    runtime.alloc_storage(bytes);
    EXPECT_TRUE(single.isnan().all().item<bool>());
  });
}

TEST(FreeStorage, really_frees_without_poison) {
  run_world(1, {.poison = false}, [](Runtime& runtime) {
    const at::Tensor tensor = at::ones({4});
    runtime.free_storage(tensor);
    EXPECT_EQ(tensor.storage().nbytes(), 0u);
    runtime.alloc_storage(tensor);
    EXPECT_EQ(tensor.storage().nbytes(), 16u);
  });
}

}  // namespace
}  // namespace ppfsdp::sim
