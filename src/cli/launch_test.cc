#include "src/cli/launch.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "src/cli/report.h"

namespace ppfsdp::cli {
namespace {

namespace fs = std::filesystem;

// launch() runs its own binary: this one, which then plays the rank by its arguments (see main).
int play_rank(const std::vector<std::string>& arguments) {
  const std::string part = arguments[0];
  const std::string rank = std::getenv("RANK");
  const bool mine = arguments.size() > 1 && arguments[1] == rank;
  if (part == "variables") {
    for (const char* name :
         {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"}) {
      fmt::print("{}={} ", name, std::getenv(name));
    }
    fmt::print("port {}\n", std::atoi(std::getenv("MASTER_PORT")) > 0 ? "given" : "missing");
    return 0;
  }
  if (part == "fail") {  // fail RANK CODE: that rank fails, the others wait until they are ended
    if (mine) {
      fmt::print(stderr, "a warning\nppfsdp: error: the reason\n");
      return std::stoi(arguments[2]);
    }
    pause();
  }
  if (part == "crash") {  // crash RANK FILE: it dies only when the others, who noticed, have ended
    if (mine) {
      sigset_t term;
      sigemptyset(&term);
      sigaddset(&term, SIGTERM);
      sigprocmask(SIG_BLOCK, &term, nullptr);
      std::ofstream(arguments[2]) << "ready";
      int number = 0;
      sigwait(&term, &number);
      kill(getpid(), SIGKILL);
    }
    while (!fs::exists(arguments[2])) usleep(1000);
    fmt::print(stderr, "ppfsdp: error: a peer is gone\n");
    return kOtherRankFailed;
  }
  if (part == "stubborn") {  // stubborn RANK: that rank fails, the others ignore SIGTERM
    if (mine) return 6;
    signal(SIGTERM, SIG_IGN);
    for (;;) pause();
  }
  if (part == "bind") {  // says whether the port can be bound, and whether rank 0 can listen there
    const auto opens = [](int reuse) {
      sockaddr_in address{};
      address.sin_family = AF_INET;
      address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      address.sin_port = htons(static_cast<uint16_t>(std::atoi(std::getenv("MASTER_PORT"))));
      const int fd = socket(AF_INET, SOCK_STREAM, 0);
      setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof(reuse));
      return bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0 &&
             listen(fd, 1) == 0;
    };
    fmt::print("others {}", opens(0));
    fmt::print(" rank 0 {}\n", opens(1));
    return 0;
  }
  if (part == "report_pid_and_hang") {
    std::ofstream(arguments[1] + "/" + rank + ".partial") << getpid();
    fs::rename(arguments[1] + "/" + rank + ".partial", arguments[1] + "/" + rank);
    for (;;) pause();
  }
  return 99;
}

struct Result {
  int code;
  std::string out;
  std::string err;
};

Result run(int processes, std::vector<std::string> command, double grace_s = 30) {
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  LaunchOptions options;
  options.processes = processes;
  options.command = std::move(command);
  options.command.insert(options.command.begin(), "--as-rank");
  options.grace_s = grace_s;
  const int code = launch(options);
  return {code, testing::internal::GetCapturedStdout(), testing::internal::GetCapturedStderr()};
}

std::vector<std::string> sorted_lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  std::sort(lines.begin(), lines.end());
  return lines;
}

// A shell's usual limit of 1024 files would be too low for half as many processes.
TEST(LaunchTest, as_many_processes_as_the_system_allows) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit low = before;
  low.rlim_cur = 30;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  const Result result = run(20, {"variables"});
  EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(sorted_lines(result.out).size(), 20u);
}

// Between the choice of a free port and rank 0's start others must not get it.
TEST(LaunchTest, a_port_that_is_chosen_is_kept_for_rank_0) {
  EXPECT_EQ(run(1, {"bind"}).out, "[0] others false rank 0 true\n");
}

TEST(LaunchTest, second_node_continues_the_first_ones_ranks) {
  testing::internal::CaptureStdout();
  LaunchOptions options;
  options.processes = 2;
  options.nodes = 3;
  options.node_rank = 1;
  options.master_addr = "node-0";
  options.port = 29500;
  options.command = {"--as-rank", "variables"};
  EXPECT_EQ(launch(options), 0);
  EXPECT_EQ(sorted_lines(testing::internal::GetCapturedStdout()),
            (std::vector<std::string>{
                "[2] RANK=2 WORLD_SIZE=6 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 MASTER_ADDR=node-0 port "
                "given",
                "[3] RANK=3 WORLD_SIZE=6 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=node-0 port "
                "given"}));
  // An error names the rank of the world, not of the node.
  testing::internal::CaptureStderr();
  options.command = {"--as-rank", "fail", "3", "1"};
  EXPECT_EQ(launch(options), kFailure);
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "[3] a warning\nppfsdp: error: rank 3: the reason\n");
}

TEST(LaunchTest, gives_torchruns_variables_and_prefixes_lines) {
  // A launcher's own variables must not shine through to the ranks.
  setenv("RANK", "77", 1);
  const Result result = run(3, {"variables"});
  unsetenv("RANK");
  EXPECT_EQ(result.code, 0);
  EXPECT_EQ(result.err, "");
  std::vector<std::string> expected;
  for (int rank = 0; rank < 3; ++rank) {
    expected.push_back(fmt::format(
        "[{0}] RANK={0} WORLD_SIZE=3 LOCAL_RANK={0} LOCAL_WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 port "
        "given",
        rank));
  }
  EXPECT_EQ(sorted_lines(result.out), expected);
}

// One rank's failure must end those that would wait for ever, and be the launcher's own.
TEST(LaunchTest, one_failure_ends_all_with_its_error) {
  for (const char* rank : {"0", "2"}) {
    const Result result = run(3, {"fail", rank, "1"});
    EXPECT_EQ(result.code, kFailure);
    EXPECT_EQ(result.err,
              fmt::format("[{0}] a warning\nppfsdp: error: rank {0}: the reason\n", rank));
  }
}

// Scripts know two codes: whatever a rank ends with is one of them.
TEST(LaunchTest, exit_code_is_usage_or_failure) {
  EXPECT_EQ(run(2, {"fail", "1", std::to_string(kUsage)}).code, kUsage);
  EXPECT_EQ(run(2, {"fail", "1", std::to_string(kOtherRankFailed)}).code, kFailure);
  EXPECT_EQ(run(2, {"fail", "1", "77"}).code, kFailure);
}

// Ranks that lost a peer may end first, but the peer is to be named.
TEST(LaunchTest, names_the_rank_that_died_not_those_that_noticed) {
  const fs::path ready = fs::temp_directory_path() / fmt::format("launch_test.{}.ready", getpid());
  const Result result = run(3, {"crash", "1", ready.string()});
  fs::remove(ready);
  EXPECT_EQ(result.code, kFailure);
  EXPECT_EQ(result.err, "ppfsdp: error: rank 1: was killed by signal 9 (Killed)\n");
}

TEST(LaunchTest, kills_what_does_not_end_in_time) {
  const Result result = run(2, {"stubborn", "1"}, 0.05);
  EXPECT_EQ(result.code, kFailure);
  EXPECT_EQ(result.err, "ppfsdp: error: rank 1: ended with exit code 6\n");
}

class LaunchedPids : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / fmt::format("launch_test.{}", getpid());
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    launcher_ = fork();
    if (launcher_ == 0) {
      LaunchOptions options;
      options.processes = 2;
      options.command = {"--as-rank", "report_pid_and_hang", folder_.string()};
      _exit(launch(options));
    }
    for (const char* rank : {"0", "1"}) {
      while (!fs::exists(folder_ / rank)) usleep(1000);
      pid_t pid = 0;
      std::ifstream(folder_ / rank) >> pid;
      pids_.push_back(pid);
    }
  }
  void TearDown() override { fs::remove_all(folder_); }

  // Returns once no process is left; the test's own timeout is the verdict when one stays.
  void wait_until_gone() const {
    for (const pid_t pid : pids_) {
      for (;;) {
        std::ifstream stat(fmt::format("/proc/{}/stat", pid));
        std::string id, name, state;
        if (!(stat >> id >> name >> state) || state == "Z") break;
        usleep(1000);
      }
    }
  }

  int wait_for_launcher() const {
    int status = 0;
    waitpid(launcher_, &status, 0);
    return status;
  }

  fs::path folder_;
  pid_t launcher_ = 0;
  std::vector<pid_t> pids_;
};

TEST_F(LaunchedPids, no_orphan_when_the_launcher_is_killed) {
  kill(launcher_, SIGKILL);
  wait_for_launcher();
  wait_until_gone();
}

TEST_F(LaunchedPids, ctrl_c_is_passed_on) {
  kill(launcher_, SIGINT);
  const int status = wait_for_launcher();
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 128 + SIGINT);
  wait_until_gone();
}

}  // namespace
}  // namespace ppfsdp::cli

int main(int argc, char** argv) {
  if (argc > 2 && std::string(argv[1]) == "--as-rank") {
    return ppfsdp::cli::play_rank({argv + 2, argv + argc});
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
