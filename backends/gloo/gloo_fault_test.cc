// Faults of whole processes: each rank is a process of its own, this program started again with
// "--scenario NAME". A rank prints its error and exits with kFailed; what hangs is killed, which
// fails the test.
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "backends/gloo/gloo.h"
#include "backends/gloo/testing/thread_world.h"
#include "src/comm/communicator.h"

extern char** environ;

namespace ppfsdp::gloo {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr int kFailed = 3;
/// Far beyond what any of these take: a process that is still there has hung.
constexpr std::chrono::seconds kDeadline{60};

// ---- What a rank does. -------------------------------------------------------------------------

void all_reduce_once(comm::Runtime& runtime, int64_t numel) {
  const at::Tensor tensor = at::full({numel}, 1.0 + runtime.rank());
  runtime.world()->all_reduce(tensor, comm::ReduceOp::sum(), runtime.compute_stream());
  const double n = runtime.world_size();
  TORCH_CHECK(tensor[numel - 1].item<double>() == n * (n + 1) / 2, "wrong sum");
}

int run_scenario(const std::string& scenario) {
  try {
    GlooOptions options = GlooOptions::from_environment();
    if (const char* timeout = std::getenv("TIMEOUT_MS")) {
      options.timeout = milliseconds(std::atoi(timeout));
    }
    const auto runtime = make_runtime(options);
    const int rank = runtime->rank();
    const bool victim = rank == 1;
    if (scenario == "meet") {
      all_reduce_once(*runtime, 1000);
    } else if (scenario == "size") {
      all_reduce_once(*runtime, victim ? 12 : 10);
    } else if (scenario == "dies") {
      all_reduce_once(*runtime, 10);
      if (victim) ::kill(::getpid(), SIGKILL);
      all_reduce_once(*runtime, 10);
    } else if (scenario == "dies_within") {
      // So much that it is under way for long enough to die in the middle.
      if (victim) {
        std::thread([] {
          std::this_thread::sleep_for(milliseconds(30));
          ::kill(::getpid(), SIGKILL);
        }).detach();
      }
      for (;;) all_reduce_once(*runtime, 4 << 20);
    } else if (scenario == "throws") {
      all_reduce_once(*runtime, 10);
      if (victim) throw std::runtime_error("rank 1 has a fault of its own");
      all_reduce_once(*runtime, 10);
    } else if (scenario == "leaves_late") {
      // One rank is done long before the other receives what it sent.
      const at::Tensor tensor = at::full({1 << 20}, 1.0 + rank);
      if (victim) {
        std::this_thread::sleep_for(milliseconds(200));
        runtime->world()->recv(tensor, 0, runtime->compute_stream());
        TORCH_CHECK(tensor[12345].item<double>() == 1.0, "wrong message");
      } else {
        const auto stream = runtime->create_stream("out", comm::StreamPriority::kNormal);
        runtime->world()->send(tensor, 1, *stream);
      }
    } else {
      throw std::runtime_error("no scenario " + scenario);
    }
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stdout, "ERROR %s\n", error.what());
    return kFailed;
  }
}

// ---- What the test does. -----------------------------------------------------------------------

struct Ended {
  int exit_code = -1;
  int signal = 0;
  bool hung = false;
  std::string output;
};

using Variables = std::map<std::string, std::string>;

class Process {
 public:
  Process(const std::string& scenario, const Variables& variables) {
    int ends[2];
    TORCH_CHECK(::pipe2(ends, O_CLOEXEC) == 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDERR_FILENO);
    std::vector<std::string> settings;
    for (char** entry = environ; *entry != nullptr; ++entry) {
      const std::string name(*entry, std::strcspn(*entry, "="));
      if (variables.count(name) == 0) settings.emplace_back(*entry);
    }
    for (const auto& [name, value] : variables) settings.push_back(name + "=" + value);
    std::vector<char*> env;
    for (std::string& setting : settings) env.push_back(setting.data());
    env.push_back(nullptr);
    std::string self = "/proc/self/exe", flag = "--scenario", name = scenario;
    char* argv[] = {self.data(), flag.data(), name.data(), nullptr};
    TORCH_CHECK(::posix_spawn(&pid_, self.c_str(), &actions, nullptr, argv, env.data()) == 0);
    posix_spawn_file_actions_destroy(&actions);
    ::close(ends[1]);
    output_ = ends[0];
  }

  /// Its end, or its end by force at the deadline.
  Ended wait(std::chrono::steady_clock::time_point deadline) {
    Ended ended;
    int status = 0;
    // A rank's output fits into the pipe, so it can end before it is read.
    while (::waitpid(pid_, &status, WNOHANG) == 0) {
      if (std::chrono::steady_clock::now() > deadline) {
        ended.hung = true;
        ::kill(pid_, SIGKILL);
        ::waitpid(pid_, &status, 0);
        break;
      }
      std::this_thread::sleep_for(milliseconds(5));
    }
    char buffer[4096];
    for (ssize_t n; (n = ::read(output_, buffer, sizeof(buffer))) > 0;) {
      ended.output.append(buffer, static_cast<size_t>(n));
    }
    ::close(output_);
    if (WIFEXITED(status)) ended.exit_code = WEXITSTATUS(status);
    if (WIFSIGNALED(status)) ended.signal = WTERMSIG(status);
    return ended;
  }

 private:
  pid_t pid_ = -1;
  int output_ = -1;
};

/// A port that was free a moment ago.
int free_port() {
  int port = 0;
  ::close(testing::listen_on_free_port(port));
  return port;
}

Variables rank_variables(int rank, int world_size, int port) {
  return {{"RANK", std::to_string(rank)},
          {"WORLD_SIZE", std::to_string(world_size)},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", std::to_string(port)},
          {"OMP_NUM_THREADS", "1"}};
}

std::vector<Ended> run_all(const std::string& scenario, const std::vector<Variables>& ranks) {
  std::vector<Process> processes;
  for (const Variables& variables : ranks) processes.emplace_back(scenario, variables);
  const auto deadline = std::chrono::steady_clock::now() + kDeadline;
  std::vector<Ended> ends;
  for (Process& process : processes) ends.push_back(process.wait(deadline));
  for (size_t i = 0; i < ends.size(); ++i) {
    EXPECT_FALSE(ends[i].hung) << "process " << i << " hung: " << ends[i].output;
  }
  return ends;
}

/// `n` ranks at one free port.
std::vector<Ended> run_world(const std::string& scenario, int n, int timeout_ms) {
  const int port = free_port();
  std::vector<Variables> ranks;
  for (int rank = 0; rank < n; ++rank) {
    ranks.push_back(rank_variables(rank, n, port));
    ranks.back()["TIMEOUT_MS"] = std::to_string(timeout_ms);
  }
  return run_all(scenario, ranks);
}

void expect_error(const Ended& ended, const ::testing::Matcher<std::string>& matcher) {
  EXPECT_EQ(ended.exit_code, kFailed) << "signal " << ended.signal << ": " << ended.output;
  EXPECT_THAT(ended.output, matcher);
}

TEST(GlooProcesses, MeetReduceAndPart) {
  for (const Ended& ended : run_world("meet", 3, 60000)) {
    EXPECT_EQ(ended.exit_code, 0) << ended.output;
    EXPECT_EQ(ended.output, "") << "a run without faults must be silent";
  }
}

TEST(GlooProcesses, AnEarlyLeaverLetsItsLastMessageArrive) {
  for (const Ended& ended : run_world("leaves_late", 2, 60000)) {
    EXPECT_EQ(ended.exit_code, 0) << ended.output;
  }
}

TEST(GlooProcesses, AMismatchIsAnErrorOnEveryRankNotAnAbort) {
  const auto ends = run_world("size", 3, 60000);
  for (int rank = 0; rank < 3; ++rank) {
    expect_error(ends[rank], AllOf(HasSubstr("rank 1 differs: it calls all_reduce of 12 Float"),
                                   HasSubstr("this is rank " + std::to_string(rank))));
  }
}

TEST(GlooProcesses, ADeadRankIsNoticedAtOnce) {
  // The timeout is longer than the deadline: only a closed connection can end these in time.
  const auto ends = run_world("dies", 3, 600000);
  EXPECT_EQ(ends[1].signal, SIGKILL);
  for (const int rank : {0, 2}) {
    expect_error(ends[rank],
                 AllOf(HasSubstr("all_reduce of 10 Float by sum on group 'world', operation 1"),
                       AnyOf(HasSubstr("rank 1 closed its connection"),
                             HasSubstr("rank 0 closed its connection"),
                             HasSubstr("rank 2 closed its connection"))));
  }
}

TEST(GlooProcesses, ARankThatDiesWithinATransferIsAnErrorWithinTheTimeout) {
  const auto ends = run_world("dies_within", 2, 2000);
  EXPECT_EQ(ends[1].signal, SIGKILL);
  expect_error(ends[0],
               AllOf(HasSubstr("all_reduce of 4194304 Float by sum"), HasSubstr("rank 1")));
}

TEST(GlooProcesses, ARankThatThrowsDoesNotKeepTheOthersWaiting) {
  const auto ends = run_world("throws", 2, 600000);
  expect_error(ends[1], HasSubstr("rank 1 has a fault of its own"));
  expect_error(ends[0], HasSubstr("rank 1 closed its connection"));
}

TEST(GlooRendezvous, SaysWhoDidNotCome) {
  const int port = free_port();
  std::vector<Variables> ranks = {rank_variables(0, 3, port), rank_variables(2, 3, port)};
  for (Variables& variables : ranks) variables["TIMEOUT_MS"] = "3000";
  for (const Ended& ended : run_all("meet", ranks)) {
    expect_error(ended, HasSubstr("rendezvous at 127.0.0.1:" + std::to_string(port) +
                                  ": 2 of 3 ranks came within 3 s; missing: 1"));
  }
}

TEST(GlooRendezvous, SaysThatRankZeroDidNotCome) {
  const int port = free_port();
  Variables variables = rank_variables(1, 2, port);
  variables["TIMEOUT_MS"] = "300";
  expect_error(run_all("meet", {variables})[0],
               HasSubstr("rank 1 of 2 found nobody listening at 127.0.0.1:" + std::to_string(port) +
                         " within 0.3 s"));
}

TEST(GlooRendezvous, SaysThatThePortIsInUse) {
  int port = 0;
  const int fd = testing::listen_on_free_port(port);
  expect_error(run_all("meet", {rank_variables(0, 2, port)})[0],
               HasSubstr("port " + std::to_string(port) +
                         " of 127.0.0.1 is in use by another process; set MASTER_PORT"));
  ::close(fd);
}

// The timeouts of these two are longer than the deadline: all ranks must be told.
TEST(GlooRendezvous, SaysThatTwoProcessesHaveOneRank) {
  const int port = free_port();
  for (const Ended& ended : run_all("meet", {rank_variables(0, 3, port), rank_variables(1, 3, port),
                                             rank_variables(1, 3, port)})) {
    expect_error(ended, HasSubstr("two processes came as rank 1 of 3"));
  }
}

TEST(GlooRendezvous, SaysThatRanksDisagreeAboutTheWorld) {
  const int port = free_port();
  for (const Ended& ended :
       run_all("meet", {rank_variables(0, 2, port), rank_variables(1, 3, port)})) {
    expect_error(ended, HasSubstr("was given a world of"));
  }
}

TEST(GlooRendezvous, SaysThatAHostHasNoAddress) {
  Variables variables = rank_variables(0, 2, 29500);
  variables["MASTER_ADDR"] = "no-such-host.invalid";
  variables["TIMEOUT_MS"] = "300";
  expect_error(run_all("meet", {variables})[0],
               HasSubstr("MASTER_ADDR 'no-such-host.invalid' has no address"));
}

}  // namespace
}  // namespace ppfsdp::gloo

int main(int argc, char** argv) {
  if (argc == 3 && std::string(argv[1]) == "--scenario") {
    return ppfsdp::gloo::run_scenario(argv[2]);
  }
  ::testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
