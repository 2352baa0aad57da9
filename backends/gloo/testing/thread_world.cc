#include "backends/gloo/testing/thread_world.h"

#include <c10/util/Exception.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace ppfsdp::gloo::testing {

int listen_on_free_port(int& port) {
  sockaddr_in name{};
  name.sin_family = AF_INET;
  name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(name);
  auto* generic = reinterpret_cast<sockaddr*>(&name);
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  TORCH_CHECK(fd >= 0 && ::bind(fd, generic, length) == 0 && ::listen(fd, SOMAXCONN) == 0 &&
                  ::getsockname(fd, generic, &length) == 0,
              "no free port on the loopback interface");
  port = ntohs(name.sin_port);
  return fd;
}

void run_threads(int n, const GlooOptions& options,
                 const std::function<void(comm::Runtime& runtime)>& fn) {
  GlooOptions mine = options;
  mine.world_size = n;
  mine.master_addr = "127.0.0.1";
  if (n > 1) mine.listen_fd = listen_on_free_port(mine.master_port);
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < n; ++rank) {
    mine.rank = rank;
    threads.emplace_back([&, mine] {
      try {
        const std::unique_ptr<comm::Runtime> runtime = make_runtime(mine);
        fn(*runtime);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!first) first = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace ppfsdp::gloo::testing
