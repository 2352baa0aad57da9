#include "backends/gloo/gloo.h"

#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <string>

#include "backends/gloo/testing/thread_world.h"

namespace ppfsdp::gloo {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// Sets the rendezvous variables for one test; an empty value unsets one.
GlooOptions options_from(const std::map<std::string, std::string>& changes) {
  std::map<std::string, std::string> variables = {
      {"RANK", "1"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "node-7"}, {"MASTER_PORT", "29501"}};
  for (const auto& [name, value] : changes) variables[name] = value;
  for (const auto& [name, value] : variables) {
    if (value.empty()) {
      unsetenv(name.c_str());
    } else {
      setenv(name.c_str(), value.c_str(), 1);
    }
  }
  return GlooOptions::from_environment();
}

std::string error_from(const std::map<std::string, std::string>& changes) {
  try {
    options_from(changes);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

TEST(GlooOptions, ComeFromTorchrunsVariables) {
  const GlooOptions options = options_from({});
  EXPECT_EQ(options.rank, 1);
  EXPECT_EQ(options.world_size, 4);
  EXPECT_EQ(options.master_addr, "node-7");
  EXPECT_EQ(options.master_port, 29501);
}

TEST(GlooOptions, NameTheVariableThatIsMissing) {
  for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    EXPECT_THAT(error_from({{name, ""}}),
                HasSubstr(std::string("environment variable ") + name + " is not set"));
  }
}

TEST(GlooOptions, NameTheVariableThatIsWrongAndWhatWouldBeRight) {
  EXPECT_THAT(error_from({{"RANK", "-1"}}),
              AllOf(HasSubstr("RANK must be an integer in [0, 3]"), HasSubstr("got '-1'")));
  EXPECT_THAT(error_from({{"RANK", "4"}}), HasSubstr("RANK must be an integer in [0, 3]"));
  EXPECT_THAT(error_from({{"RANK", "1x"}}), HasSubstr("got '1x'"));
  EXPECT_THAT(error_from({{"RANK", "99999999999"}}), HasSubstr("got '99999999999'"));
  EXPECT_THAT(error_from({{"WORLD_SIZE", "0"}}),
              HasSubstr("WORLD_SIZE must be an integer in [1, "));
  EXPECT_THAT(error_from({{"WORLD_SIZE", "four"}}), HasSubstr("got 'four'"));
  EXPECT_THAT(error_from({{"MASTER_PORT", "65536"}}),
              HasSubstr("MASTER_PORT must be an integer in [1, 65535]"));
}

TEST(GlooOptions, AreCheckedByMakeRuntime) {
  GlooOptions options;
  options.rank = 2;
  options.world_size = 2;
  EXPECT_THROW(make_runtime(options), c10::Error);
  options.rank = 0;
  options.timeout = std::chrono::milliseconds(0);
  EXPECT_THROW(make_runtime(options), c10::Error);
}

TEST(GlooRuntime, OfOneRankNeedsNoAddress) {
  GlooOptions options;
  options.master_addr = "no-such-host.invalid";
  const auto runtime = make_runtime(options);
  const at::Tensor tensor = at::full({2}, 3.0);
  runtime->world()->all_reduce(tensor, comm::ReduceOp::avg(), runtime->compute_stream());
  EXPECT_EQ(tensor[0].item<float>(), 3.0f);
  EXPECT_EQ(runtime->backend(), "gloo");
}

TEST(GlooRuntime, StreamsOfAnotherBackendAreRefused) {
  class Foreign : public comm::Stream {
   public:
    Foreign() : Stream("foreign") {}
    void run(std::function<void()>) override {}
    comm::EventPtr record() override { return nullptr; }
    void wait(const comm::EventPtr&) override {}
    void synchronize() override {}
  } foreign;
  const auto runtime = make_runtime(GlooOptions());
  EXPECT_THROW(runtime->world()->broadcast(at::full({2}, 3.0), 0, foreign), c10::Error);
}

TEST(GlooRuntime, AStreamThatIsDestroyedStillRunsItsWork) {
  testing::run_threads(2, GlooOptions(), [](comm::Runtime& runtime) {
    const at::Tensor tensor = at::full({2}, 1.0);
    {
      const auto stream = runtime.create_stream("short", comm::StreamPriority::kNormal);
      runtime.world()->all_reduce(tensor, comm::ReduceOp::sum(), *stream);
      stream->run([tensor] { tensor.add_(1); });
    }
    EXPECT_EQ(tensor[1].item<float>(), 3.0f);
  });
}

TEST(GlooRuntime, WorkMayOutliveItsRuntimesOwner) {
  // A communicator, a stream and an event that are let go of after the runtime.
  testing::run_threads(2, GlooOptions(), [](comm::Runtime& runtime) {
    GlooOptions alone;
    auto other = make_runtime(alone);
    const comm::CommunicatorPtr world = other->world();
    const auto stream = other->create_stream("late", comm::StreamPriority::kNormal);
    const at::Tensor tensor = at::full({2}, 1.0);
    world->all_reduce(tensor, comm::ReduceOp::sum(), *stream);
    const comm::EventPtr event = stream->record();
    other.reset();
    event->synchronize();
    EXPECT_EQ(tensor[0].item<float>(), 1.0f);
  });
}

}  // namespace
}  // namespace ppfsdp::gloo
