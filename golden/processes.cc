#include "golden/processes.h"

#include <arpa/inet.h>
#include <c10/util/Exception.h>
#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>

namespace ppfsdp::golden {
namespace {

/// A port that was free a moment ago.
int free_port() {
  const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  const bool found = socket >= 0 &&
                     ::bind(socket, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
                     ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size) == 0;
  const std::string problem = std::strerror(errno);
  if (socket >= 0) ::close(socket);
  TORCH_CHECK(found, "can't find a free port on 127.0.0.1: ", problem);
  return ntohs(address.sin_port);
}

pid_t start(int rank, int world, const std::string& port, std::vector<char*>& argv) {
  const pid_t parent = ::getpid();
  const pid_t child = ::fork();
  TORCH_CHECK(child >= 0, "can't start process ", rank, ": ", std::strerror(errno));
  if (child > 0) return child;
  // An interrupted parent must not leave ranks behind that wait for each other.
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);
  ::setenv("RANK", std::to_string(rank).c_str(), 1);
  ::setenv("LOCAL_RANK", std::to_string(rank).c_str(), 1);
  ::setenv("WORLD_SIZE", std::to_string(world).c_str(), 1);
  ::setenv("MASTER_ADDR", "127.0.0.1", 1);
  ::setenv("MASTER_PORT", port.c_str(), 1);
  ::execv("/proc/self/exe", argv.data());
  ::_exit(127);
}

}  // namespace

bool launched() { return std::getenv("RANK") != nullptr; }

int run_processes(int world, const std::vector<std::string>& arguments) {
  std::vector<std::string> copies = arguments;
  std::string program = "replay";
  std::vector<char*> argv = {program.data()};
  for (std::string& argument : copies) argv.push_back(argument.data());
  argv.push_back(nullptr);
  const std::string port = std::to_string(free_port());
  std::vector<pid_t> running;
  for (int rank = 0; rank < world; ++rank) running.push_back(start(rank, world, port, argv));
  int result = 0;
  while (!running.empty()) {
    int status = 0;
    const pid_t ended = ::waitpid(-1, &status, 0);
    if (ended < 0 && errno == EINTR) continue;
    TORCH_CHECK(ended >= 0, "can't wait for the processes: ", std::strerror(errno));
    if (std::erase(running, ended) == 0) continue;
    const int code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    if (code == 0 || result != 0) continue;
    result = code;
    for (const pid_t other : running) ::kill(other, SIGTERM);
  }
  return result;
}

}  // namespace ppfsdp::golden
