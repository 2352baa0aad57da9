#include "src/cli/launch.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <optional>
#include <stdexcept>

#include "src/cli/child_output.h"
#include "src/cli/report.h"

namespace ppfsdp::cli {
namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error(fmt::format("launch: cannot {}: {}", what, std::strerror(errno)));
}

/// A free port of the loopback interface, which the system gives to nobody else meanwhile.
class HeldPort {
 public:
  HeldPort() : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    const int on = 1;
    // Rank 0, which sets SO_REUSEADDR too, may listen there. Set before bind, it could get a port
    // that another launch holds.
    if (fd_ < 0 || bind(fd_, reinterpret_cast<sockaddr*>(&address), size) != 0 ||
        setsockopt(fd_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0 ||
        getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
      fail("find a free port");
    }
    number_ = ntohs(address.sin_port);
  }
  ~HeldPort() { close(fd_); }
  HeldPort(const HeldPort&) = delete;
  HeldPort& operator=(const HeldPort&) = delete;

  int number() const { return number_; }

 private:
  int fd_;
  int number_ = 0;
};

/// Two pipes a process may be more files than a process may open by default, though not at most.
void allow_pipes(int processes) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) fail("tell how many files may be open");
  const rlim_t others = 64;
  const rlim_t needed = 2 * static_cast<rlim_t>(processes) + others;
  if (limit.rlim_cur >= needed) return;
  limit.rlim_cur = std::min(needed, limit.rlim_max);
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0) fail("open as many files as there are pipes");
}

/// This process's environment with the launcher's variables in place of any there already.
std::vector<std::string> environment_of(const start::Launched& place) {
  start::Environment variables = start::process_environment();
  variables["RANK"] = std::to_string(place.rank);
  variables["WORLD_SIZE"] = std::to_string(place.world_size);
  variables["LOCAL_RANK"] = std::to_string(place.local_rank);
  variables["LOCAL_WORLD_SIZE"] = std::to_string(place.local_world_size);
  variables["MASTER_ADDR"] = place.master_addr;
  variables["MASTER_PORT"] = std::to_string(place.master_port);
  variables[start::kLaunchedVariable] = "1";
  std::vector<std::string> environment;
  for (const auto& [name, value] : variables) environment.push_back(name + "=" + value);
  return environment;
}

/// The null-ended array of addresses that exec takes; valid as long as `strings`.
std::vector<char*> addresses(std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (std::string& text : strings) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

struct Child {
  pid_t pid;
  ChildOutput out;
  ChildOutput err;
  std::optional<int> status;  ///< from waitpid, once it has ended
};

/// Blocks signals as long as it lives, so that they can be read from a descriptor, and gives the
/// old mask to children.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t mask;
    sigemptyset(&mask);
    for (int number : {SIGINT, SIGTERM, SIGCHLD}) sigaddset(&mask, number);
    sigprocmask(SIG_BLOCK, &mask, &before_);
    descriptor_ = signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK);
    if (descriptor_ < 0) fail("listen for signals");
  }
  ~BlockedSignals() {
    close(descriptor_);
    sigprocmask(SIG_SETMASK, &before_, nullptr);
  }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

  int descriptor() const { return descriptor_; }
  const sigset_t& before() const { return before_; }

 private:
  sigset_t before_;
  int descriptor_;
};

class Launch {
 public:
  explicit Launch(const LaunchOptions& options) : options_(options) {
    allow_pipes(options.processes);
    if (options.port == 0) held_port_.emplace();
    const int port = held_port_ ? held_port_->number() : options.port;
    children_.reserve(static_cast<size_t>(options.processes));
    for (int local_rank = 0; local_rank < options.processes; ++local_rank) {
      start::Launched place = place_of(options, local_rank);
      place.master_port = port;
      start_rank(place);
    }
  }

  ~Launch() {
    signal_all(SIGKILL);
    for (Child& child : children_) {
      if (!child.status) waitpid(child.pid, nullptr, 0);
    }
  }

  int run() {
    while (!ended()) {
      wait_for_something();
      for (Child& child : children_) {
        child.out.pump();
        child.err.pump();
      }
      handle_signals();
      reap();
      if (kill_at_ && Clock::now() >= *kill_at_) {
        signal_all(SIGKILL);
        kill_at_.reset();
      }
    }
    return result();
  }

 private:
  void start_rank(const start::Launched& place) {
    int out[2], err[2];
    if (pipe2(out, O_CLOEXEC) != 0 || pipe2(err, O_CLOEXEC) != 0) fail("make a pipe");
    std::vector<std::string> arguments = {"ppfsdp"};
    arguments.insert(arguments.end(), options_.command.begin(), options_.command.end());
    std::vector<std::string> environment = environment_of(place);
    // All memory is got before the fork: the child may only call what is safe in a signal handler.
    const std::vector<char*> argv = addresses(arguments), envp = addresses(environment);
    const pid_t launcher = getpid();
    const pid_t pid = fork();
    if (pid < 0) fail("start a process");
    if (pid == 0) {
      // A group of its own: the terminal's Ctrl-C reaches it through the launcher alone, once.
      setpgid(0, 0);
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != launcher) _exit(kFailure);
      const int null = open("/dev/null", O_RDONLY);
      dup2(null, STDIN_FILENO);
      dup2(out[1], STDOUT_FILENO);
      dup2(err[1], STDERR_FILENO);
      sigprocmask(SIG_SETMASK, &signals_.before(), nullptr);
      execve("/proc/self/exe", argv.data(), envp.data());
      _exit(127);
    }
    setpgid(pid, pid);
    close(out[1]);
    close(err[1]);
    const std::string prefix = options_.prefix_lines ? fmt::format("[{}] ", place.rank) : "";
    children_.push_back(
        {pid, ChildOutput(out[0], prefix, stdout), ChildOutput(err[0], prefix, stderr), {}});
  }

  bool ended() const {
    return std::all_of(children_.begin(), children_.end(), [](const Child& child) {
      return child.status && child.out.descriptor() < 0 && child.err.descriptor() < 0;
    });
  }

  void wait_for_something() {
    std::vector<pollfd> polled = {{signals_.descriptor(), POLLIN, 0}};
    for (const Child& child : children_) {
      for (const int descriptor : {child.out.descriptor(), child.err.descriptor()}) {
        if (descriptor >= 0) polled.push_back({descriptor, POLLIN, 0});
      }
    }
    int timeout = -1;
    if (kill_at_) {
      const auto left =
          std::chrono::duration_cast<std::chrono::milliseconds>(*kill_at_ - Clock::now());
      timeout = std::max(0, static_cast<int>(left.count()) + 1);
    }
    poll(polled.data(), polled.size(), timeout);
  }

  void handle_signals() {
    signalfd_siginfo info;
    while (read(signals_.descriptor(), &info, sizeof(info)) == sizeof(info)) {
      const int number = static_cast<int>(info.ssi_signo);
      if (number == SIGCHLD) continue;
      signal_all(stopping_ ? SIGKILL : number);
      stopping_ = true;
      if (passed_on_ == 0) passed_on_ = number;
    }
  }

  void reap() {
    for (Child& child : children_) {
      int status = 0;
      if (child.status || waitpid(child.pid, &status, WNOHANG) != child.pid) continue;
      child.status = status;
      if (status == 0) continue;
      // A rank that ends on a signal that was passed on lets the others come to their own end.
      if (!failed_ && !stopping_) {
        signal_all(SIGTERM);
        stopping_ = true;
        kill_at_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                      std::chrono::duration<double>(options_.grace_s));
      }
      // What it said last tells whether it failed by itself.
      child.err.pump();
      ended_in_failure_.push_back(&child);
      failed_ = true;
    }
  }

  void signal_all(int number) {
    killed_ = killed_ || number == SIGKILL;
    for (Child& child : children_) {
      if (!child.status) kill(-child.pid, number);
    }
  }

  static int code_of(const Child& child) {
    const int status = *child.status;
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  }

  /// The process whose failure made the others fail, as far as can be told.
  const Child& culprit() const {
    // By what it reports a rank can be a victim; the first that is none is the cause. One that ends
    // by a signal after SIGTERM went round may only have obeyed.
    const auto is_victim = [&](const Child* child) {
      const int code = code_of(*child);
      const bool obeyed = child != ended_in_failure_.front() &&
                          (code == 128 + SIGTERM || (code == 128 + SIGKILL && killed_));
      return code == kOtherRankFailed || obeyed;
    };
    const auto found =
        std::find_if_not(ended_in_failure_.begin(), ended_in_failure_.end(), is_victim);
    return found == ended_in_failure_.end() ? *ended_in_failure_.front() : **found;
  }

  int result() const {
    if (!failed_) return kSuccess;
    const Child& child = culprit();
    const int code = code_of(child);
    const int rank = place_of(options_, static_cast<int>(&child - children_.data())).rank;
    // Ranks that stopped as they were told have said so themselves.
    if (code == 128 + SIGINT || code == 128 + SIGTERM) return code;
    if (code == 128 + SIGKILL && passed_on_ != 0) return 128 + passed_on_;
    std::string what = child.err.last_error();
    if (what.empty()) {
      what = WIFSIGNALED(*child.status)
                 ? fmt::format("was killed by signal {} ({})", code - 128, strsignal(code - 128))
                 : fmt::format("ended with exit code {}", code);
    }
    std::fputs(fmt::format("ppfsdp: error: rank {}: {}\n", rank, what).c_str(), stderr);
    return code == kUsage ? kUsage : kFailure;
  }

  const LaunchOptions& options_;
  std::optional<HeldPort> held_port_;
  BlockedSignals signals_;
  std::vector<Child> children_;
  std::vector<const Child*> ended_in_failure_;
  std::optional<Clock::time_point> kill_at_;
  int passed_on_ = 0;    ///< the first signal that this process got and passed on
  bool killed_ = false;  ///< whether SIGKILL has gone round
  bool failed_ = false;
  bool stopping_ = false;
};

}  // namespace

start::Launched place_of(const LaunchOptions& options, int local_rank) {
  return {.launcher = "ppfsdp launch",
          .rank = options.node_rank * options.processes + local_rank,
          .world_size = options.nodes * options.processes,
          .local_rank = local_rank,
          .local_world_size = options.processes,
          .master_addr = options.master_addr,
          .master_port = options.port};
}

int launch(const LaunchOptions& options) { return Launch(options).run(); }

}  // namespace ppfsdp::cli
