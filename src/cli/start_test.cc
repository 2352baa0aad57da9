// Starts the ppfsdp binary as launchers on clusters do: real processes that have nothing but a
// launcher's variables. They train, or say in one line each what is wrong, and end by themselves.
#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backends/start/launcher.h"
#include "backends/start/testing/agent_store.h"
#include "src/train/test_util.h"

namespace ppfsdp::cli {
namespace {

namespace fs = std::filesystem;
using start::Environment;
using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

/// Far beyond what any process takes: one that is still there has hung.
constexpr std::chrono::seconds kDeadline{120};

struct Ended {
  int code = -1;
  std::string out;
  std::string err;
};

/// One process to start.
struct Start {
  Environment variables;
  std::vector<std::string> arguments;
  std::string binary = fs::absolute("src/cli/ppfsdp").string();
};

/// A port of the loopback interface on which this listens, unless it is closed.
class Port {
 public:
  explicit Port(int number = 0) : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(number));
    socklen_t size = sizeof(address);
    free_ = ::bind(fd_, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
            ::listen(fd_, SOMAXCONN) == 0 &&
            ::getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &size) == 0;
    number_ = ntohs(address.sin_port);
  }
  ~Port() { close(); }
  Port(const Port&) = delete;
  Port& operator=(const Port&) = delete;

  void close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }
  bool was_free() const { return free_; }
  int number() const { return number_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
  bool free_ = false;
  int number_ = 0;
};

/// A port that was free a moment ago.
std::string free_port() { return std::to_string(Port().number()); }

/// A number of a job whose port is free.
int free_job() {
  int job = getpid();
  while (!Port(start::slurm_port(job, 0)).was_free()) ++job;
  return job;
}

class StartTest : public train::FolderTest {
 protected:
  void SetUp() override {
    FolderTest::SetUp();
    text_ = write_text();
  }

  /// A training that is small enough for many of them, whatever the number of ranks. The timeout is
  /// waited for only where a fault has no other end.
  std::vector<std::string> train(const std::vector<std::string>& settings = {},
                                 int timeout_s = 100) const {
    std::vector<std::string> arguments = {"train"};
    std::vector<std::string> all = {"data.files=" + text_,
                                    "training.steps=2",
                                    "model.dim=8",
                                    "model.layers=1",
                                    "model.heads=2",
                                    "model.kv_heads=1",
                                    "model.hidden=12",
                                    "data.seq_len=6",
                                    "training.global_batch=12",
                                    fmt::format("communication.timeout_s={}", timeout_s)};
    all.insert(all.end(), settings.begin(), settings.end());
    for (const std::string& setting : all) {
      arguments.push_back("--set");
      arguments.push_back(setting);
    }
    return arguments;
  }

  std::vector<std::string> launch_train() const {
    std::vector<std::string> arguments = train();
    arguments.insert(arguments.begin(), {"launch", "--"});
    return arguments;
  }

  pid_t spawn(const Start& start, const std::string& name) const {
    // Of this test's own environment all that no launcher sets.
    std::vector<std::string> entries;
    for (const auto& [variable, value] : start::process_environment()) {
      const bool of_a_launcher = variable.starts_with("SLURM_") || variable.starts_with("PET_") ||
                                 variable.starts_with("TORCHELASTIC_") ||
                                 start.variables.contains(variable);
      if (!of_a_launcher) entries.push_back(variable + "=" + value);
    }
    for (const auto& [variable, value] : start.variables) entries.push_back(variable + "=" + value);
    std::vector<std::string> words = start.arguments;
    words.insert(words.begin(), start.binary);
    std::vector<char*> argv, envp;
    for (std::string& word : words) argv.push_back(word.data());
    for (std::string& entry : entries) envp.push_back(entry.data());
    argv.push_back(nullptr);
    envp.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    const int flags = O_WRONLY | O_CREAT | O_TRUNC;
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 1, path(name + ".out").c_str(), flags, 0600);
    posix_spawn_file_actions_addopen(&actions, 2, path(name + ".err").c_str(), flags, 0600);
    pid_t pid = -1;
    EXPECT_EQ(posix_spawn(&pid, start.binary.c_str(), &actions, nullptr, argv.data(), envp.data()),
              0);
    posix_spawn_file_actions_destroy(&actions);
    return pid;
  }

  std::string read(const std::string& name) const {
    std::ostringstream text;
    text << std::ifstream(folder_ / name, std::ios::binary).rdbuf();
    return text.str();
  }

  /// Runs all at once, until each has ended.
  std::vector<Ended> run_all(const std::vector<Start>& starts) const {
    std::vector<pid_t> pids;
    for (size_t i = 0; i < starts.size(); ++i) {
      pids.push_back(spawn(starts[i], std::to_string(i)));
    }
    std::vector<Ended> ends(starts.size());
    const auto deadline = std::chrono::steady_clock::now() + kDeadline;
    for (size_t i = 0; i < starts.size(); ++i) {
      int status = 0;
      while (waitpid(pids[i], &status, WNOHANG) == 0) {
        if (std::chrono::steady_clock::now() > deadline) {
          ADD_FAILURE() << "process " << i << " hung";
          kill(pids[i], SIGKILL);
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      ends[i].code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
      ends[i].out = read(std::to_string(i) + ".out");
      ends[i].err = read(std::to_string(i) + ".err");
    }
    return ends;
  }

  /// The losses and norms that a training printed.
  static std::vector<std::string> losses(const std::string& out) {
    std::vector<std::string> result;
    std::istringstream stream(out);
    for (std::string line; std::getline(stream, line);) {
      const size_t begin = line.find("step:"), end = line.find("  tokens/s");
      if (begin != std::string::npos) result.push_back(line.substr(begin, end - begin));
    }
    return result;
  }

  /// The processes must train what as many simulated ranks do, which the first of them prints.
  void expect_trains(const std::vector<Start>& starts, int ranks) const {
    const std::vector<Ended> ends = run_all(starts);
    for (size_t i = 0; i < ends.size(); ++i) {
      EXPECT_EQ(ends[i].code, 0) << "process " << i << ": " << ends[i].err;
      EXPECT_EQ(ends[i].err, "") << "process " << i;
    }
    EXPECT_THAT(ends[0].out, HasSubstr(fmt::format("backend: gloo, {} ranks", ranks)));
    const Ended sim = run_all({{{}, train({fmt::format("parallelism.ranks={}", ranks)})}})[0];
    EXPECT_THAT(sim.out, HasSubstr("backend: sim"));
    EXPECT_EQ(losses(sim.out).size(), 2u) << sim.err;
    EXPECT_EQ(losses(ends[0].out), losses(sim.out));
  }

  /// Each process must fail with code 1 and one line.
  void expect_all_say(const std::vector<Start>& starts,
                      const ::testing::Matcher<std::string>& message) const {
    const std::vector<Ended> ends = run_all(starts);
    for (size_t i = 0; i < ends.size(); ++i) {
      EXPECT_EQ(ends[i].code, 1) << "process " << i << ": " << ends[i].err;
      EXPECT_EQ(std::ranges::count(ends[i].err, '\n'), 1) << ends[i].err;
      EXPECT_THAT(ends[i].err, AllOf(StartsWith("ppfsdp: error: "), message)) << "process " << i;
    }
  }

  /// Ranks 0 to n - 1 by torchrun's variables on one machine.
  std::vector<Start> world(int n, int timeout_s = 100) const {
    const std::string port = free_port();
    std::vector<Start> starts;
    for (int rank = 0; rank < n; ++rank) {
      starts.push_back({{{"RANK", std::to_string(rank)},
                         {"WORLD_SIZE", std::to_string(n)},
                         {"LOCAL_RANK", std::to_string(rank)},
                         {"LOCAL_WORLD_SIZE", std::to_string(n)},
                         {"MASTER_ADDR", "127.0.0.1"},
                         {"MASTER_PORT", port}},
                        train({}, timeout_s)});
    }
    return starts;
  }

  /// As srun starts three tasks on two nodes.
  std::vector<Start> slurm_step() const {
    const std::string job = std::to_string(free_job());
    std::vector<Start> starts;
    for (int task = 0; task < 3; ++task) {
      starts.push_back({{{"SLURM_JOB_ID", job},
                         {"SLURM_STEP_ID", "0"},
                         {"SLURM_PROCID", std::to_string(task)},
                         {"SLURM_NODEID", task < 2 ? "0" : "1"},
                         {"SLURM_LOCALID", task == 1 ? "1" : "0"},
                         {"SLURM_NTASKS", "3"},
                         {"SLURM_STEP_NUM_TASKS", "3"},
                         {"SLURM_STEP_TASKS_PER_NODE", "2,1"},
                         {"SLURM_STEP_NODELIST", "localhost,gpu[07-08]"}},
                        train()});
    }
    return starts;
  }

  /// As the training operator starts two pods of two processes each.
  std::vector<Start> pods() const {
    const std::string port = free_port();
    std::vector<Start> starts;
    for (const char* pod : {"0", "1"}) {
      starts.push_back({{{"KUBERNETES_SERVICE_HOST", "10.96.0.1"},
                         {"RANK", pod},
                         {"WORLD_SIZE", "4"},
                         {"MASTER_ADDR", "localhost"},
                         {"MASTER_PORT", port},
                         {"PET_NNODES", "2"},
                         {"PET_NPROC_PER_NODE", "2"},
                         {"PET_NODE_RANK", pod},
                         {"PET_MASTER_ADDR", "localhost"},
                         {"PET_MASTER_PORT", port}},
                        launch_train()});
    }
    return starts;
  }

  std::string text_;
};

// ---- Each launcher's variables
// -------------------------------------------------------------------

TEST_F(StartTest, torchruns_variables) { expect_trains(world(2), 2); }

// torchrun's agent holds the port already, and serves the store there.
TEST_F(StartTest, torchruns_agent) {
  Port port;
  const auto agent = start::testing::serve_agent_store(port.number(), port.release());
  std::vector<Start> starts = world(2);
  for (Start& start : starts) {
    start.variables["MASTER_PORT"] = std::to_string(port.number());
    start.variables["TORCHELASTIC_RUN_ID"] = "none";
    start.variables["TORCHELASTIC_USE_AGENT_STORE"] = "True";
    start.variables["TORCHELASTIC_RESTART_COUNT"] = "1";
  }
  expect_trains(starts, 2);
}

TEST_F(StartTest, slurms_variables) { expect_trains(slurm_step(), 3); }

TEST_F(StartTest, kubernetes_with_one_process_a_pod) {
  std::vector<Start> starts = world(3);
  for (Start& start : starts) {
    start.variables.erase("LOCAL_RANK");
    start.variables.erase("LOCAL_WORLD_SIZE");
    start.variables["MASTER_ADDR"] = "localhost";
    start.variables["KUBERNETES_SERVICE_HOST"] = "10.96.0.1";
    start.variables["PET_NNODES"] = "3";
    start.variables["PET_NODE_RANK"] = start.variables["RANK"];
    start.variables["PET_NPROC_PER_NODE"] = "auto";
  }
  expect_trains(starts, 3);
}

TEST_F(StartTest, kubernetes_with_launch_in_each_pod) { expect_trains(pods(), 4); }

// As the newer operator's TrainJob has it: no RANK, no WORLD_SIZE.
TEST_F(StartTest, kubernetes_train_job) {
  std::vector<Start> starts = pods();
  for (Start& start : starts) {
    for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
      start.variables.erase(name);
    }
    start.variables["PET_NPROC_PER_NODE"] = "1";
  }
  expect_trains(starts, 2);
}

// It has the variables of task 0, but is no rank: it would wait for others that nobody started.
TEST_F(StartTest, a_batch_script_is_no_rank) {
  Start script = slurm_step()[0];
  script.variables.erase("SLURM_STEP_ID");
  const Ended ended = run_all({script})[0];
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_THAT(ended.out, HasSubstr("backend: sim, 4 ranks"));
}

// ---- Faults
// --------------------------------------------------------------------------------------

TEST_F(StartTest, a_rank_that_never_comes) {
  std::vector<Start> starts = world(3, /*timeout_s=*/10);
  starts.erase(starts.begin() + 1);
  expect_all_say(starts, EndsWith(": 2 of 3 ranks came within 10 s; missing: 1\n"));
}

TEST_F(StartTest, two_processes_with_one_rank) {
  std::vector<Start> starts = world(3);
  starts[2].variables["RANK"] = "1";
  expect_all_say(starts, HasSubstr("two processes came as rank 1 of 3; start each rank once"));
}

TEST_F(StartTest, world_sizes_that_differ) {
  std::vector<Start> starts = world(2);
  starts[1].variables["WORLD_SIZE"] = "3";
  expect_all_say(starts, AllOf(HasSubstr("was given a world of"), HasSubstr("of 3"),
                               HasSubstr("rank 0"), HasSubstr("rank 1")));
}

TEST_F(StartTest, configs_that_differ) {
  std::vector<Start> starts = world(3);
  // The first key that differs is named, not the last.
  starts[1].arguments = train({"training.seed=1", "optimizer.lr=0.5"});
  expect_all_say(starts,
                 EndsWith(": ranks differ in training.seed: 0 on ranks 0, 2; 1 on rank 1\n"));
}

// A launcher shows one rank's error, and its own exit code.
TEST_F(StartTest, configs_that_differ_between_two_launchers) {
  std::vector<Start> starts = pods();
  starts[1].arguments.insert(starts[1].arguments.end(), {"--set", "training.max_norm=2"});
  expect_all_say(starts,
                 AllOf(StartsWith("ppfsdp: error: rank "),
                       EndsWith(": ranks differ in training.max_norm: 1.0 on ranks 0, 1; 2.0 on "
                                "ranks 2, 3\n")));
}

TEST_F(StartTest, code_versions_that_differ) {
  std::vector<Start> starts = world(3);
  // The same program with one byte more; it finds LibTorch where this test found it.
  starts[2].binary = path("ppfsdp");
  fs::copy_file(starts[0].binary, starts[2].binary);
  fs::permissions(starts[2].binary, fs::perms::owner_all);
  std::ofstream(starts[2].binary, std::ios::binary | std::ios::app) << '\0';
  std::string folders;
  for (const char* library : {"libc10.so", "libtorch_cpu.so"}) {
    void* handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
    ASSERT_NE(handle, nullptr) << library;
    std::string folder(4096, '\0');
    ASSERT_EQ(dlinfo(handle, RTLD_DI_ORIGIN, folder.data()), 0);
    dlclose(handle);
    folders += std::string(folder.c_str()) + ":";
  }
  starts[2].variables["LD_LIBRARY_PATH"] = folders;
  expect_all_say(starts, AllOf(HasSubstr(": ranks differ in the build of this program: "),
                               HasSubstr(" on ranks 0, 1; "), EndsWith(" on rank 2\n")));
}

// Its signal would otherwise be noticed by the first step, which never comes.
TEST_F(StartTest, a_signal_ends_a_rank_that_waits_for_others) {
  const Start start = world(2)[0];
  const pid_t pid = spawn(start, "0");
  const int port = std::stoi(start.variables.at("MASTER_PORT"));
  const auto deadline = std::chrono::steady_clock::now() + kDeadline;
  while (Port(port).was_free() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  kill(pid, SIGTERM);
  int status = 0;
  ASSERT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM) << read("0.err");
}

// Another program holds the port: rank 0 can't serve there, the others find what does not answer.
TEST_F(StartTest, a_port_in_use) {
  const Port port;
  std::vector<Start> starts = world(2, /*timeout_s=*/5);
  for (Start& start : starts) start.variables["MASTER_PORT"] = std::to_string(port.number());
  expect_all_say(starts,
                 AllOf(HasSubstr(std::to_string(port.number())),
                       ::testing::AnyOf(HasSubstr("is in use by another process; set MASTER_PORT"),
                                        HasSubstr("did not answer rank 1 of 2 as rank 0 does"))));
}

// LibTorch would log its failure to understand the answer, with a stack trace.
TEST_F(StartTest, a_port_of_a_program_that_answers_otherwise) {
  Port port;
  const int listener = port.release();
  std::thread server([listener] {
    for (int fd; (fd = ::accept(listener, nullptr, nullptr)) >= 0; ::close(fd)) {
      const std::string answer = "HTTP/1.1 400 Bad Request\r\n\r\n";
      ::send(fd, answer.data(), answer.size(), MSG_NOSIGNAL);
      // What it has not read would else take the answer away with the connection.
      ::shutdown(fd, SHUT_WR);
      for (char byte; ::recv(fd, &byte, 1, 0) > 0;) {
      }
    }
  });
  std::vector<Start> starts = world(2, /*timeout_s=*/5);
  for (Start& start : starts) start.variables["MASTER_PORT"] = std::to_string(port.number());
  expect_all_say(starts, HasSubstr(std::to_string(port.number())));
  ::shutdown(listener, SHUT_RDWR);
  server.join();
  ::close(listener);
}

// Nothing is to be found out by waiting: it is said at once, as a fault of the command.
TEST_F(StartTest, variables_that_contradict_each_other) {
  std::vector<Start> starts = slurm_step();
  for (Start& start : starts) {
    start.variables["RANK"] = "0";
    start.variables["WORLD_SIZE"] = "3";
    start.variables["MASTER_ADDR"] = "127.0.0.1";
    start.variables["MASTER_PORT"] = "29500";
  }
  starts.erase(starts.begin());
  const std::vector<Ended> ends = run_all(starts);
  for (const Ended& ended : ends) EXPECT_EQ(ended.code, 2);
  EXPECT_THAT(ends[0].err,
              StartsWith("ppfsdp: error: RANK is 0, but SLURM_PROCID is 1 in a step of 3 tasks; "));
  EXPECT_THAT(ends[1].err,
              StartsWith("ppfsdp: error: RANK is 0, but SLURM_PROCID is 2 in a step of 3 tasks; "));
}

}  // namespace
}  // namespace ppfsdp::cli
