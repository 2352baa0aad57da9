#include "backends/start/address.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>
#include <utility>

#include "src/comm/communicator.h"

namespace ppfsdp::start {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

class Socket {
 public:
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket() {
    if (fd_ < 0) return;
    const int error = errno;  // the caller's
    ::close(fd_);
    errno = error;
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

/// Whether somebody accepts connections there now.
bool listens(const addrinfo& address) {
  const Socket socket(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (socket.get() < 0) return false;
  if (::connect(socket.get(), address.ai_addr, address.ai_addrlen) == 0) return true;
  if (errno != EINPROGRESS) return false;
  pollfd wanted{socket.get(), POLLOUT, 0};
  if (::poll(&wanted, 1, /*timeout=*/1000) != 1) return false;
  int error = 0;
  socklen_t length = sizeof(error);
  ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  return error == 0;
}

}  // namespace

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address == "::1" || address.starts_with("::ffff:127.");
}

Addresses resolve(const std::string& host, int port, Clock::time_point deadline) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  for (milliseconds pause{50};; pause = std::min(pause * 2, milliseconds(1000))) {
    addrinfo* found = nullptr;
    const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
    if (error == 0) return Addresses(found, &freeaddrinfo);
    if (Clock::now() + pause > deadline) {
      throw comm::CommError(fmt::format("rendezvous: MASTER_ADDR '{}' has no address: {}", host,
                                        gai_strerror(error)));
    }
    std::this_thread::sleep_for(pause);
  }
}

std::string numeric(const addrinfo& address) {
  char host[NI_MAXHOST];
  const int error = getnameinfo(address.ai_addr, address.ai_addrlen, host, sizeof(host), nullptr, 0,
                                NI_NUMERICHOST);
  return error == 0 ? host : std::string();
}

bool means_this_machine(const std::string& host) {
  return host == "localhost" || is_loopback(host);
}

std::string source_towards(const std::string& address) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST;
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  // A port is needed, but nothing is sent.
  if (getaddrinfo(address.c_str(), "9", &hints, &found) != 0) return "";
  const Addresses to(found, &freeaddrinfo);
  const Socket socket(::socket(to->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_storage name{};
  addrinfo from = *to;
  from.ai_addr = reinterpret_cast<sockaddr*>(&name);
  from.ai_addrlen = sizeof(name);
  if (socket.get() < 0 || ::connect(socket.get(), to->ai_addr, to->ai_addrlen) != 0 ||
      ::getsockname(socket.get(), from.ai_addr, &from.ai_addrlen) != 0) {
    return "";
  }
  return numeric(from);
}

int listen_at(const std::string& address, int port, bool only_there) {
  const bool v6 = address.find(':') != std::string::npos;
  sockaddr_in6 name6{};
  name6.sin6_family = AF_INET6;
  name6.sin6_port = htons(static_cast<uint16_t>(port));
  name6.sin6_addr = in6addr_any;
  sockaddr_in name4{};
  name4.sin_family = AF_INET;
  name4.sin_port = name6.sin6_port;
  name4.sin_addr.s_addr = htonl(INADDR_ANY);
  if (only_there && v6) inet_pton(AF_INET6, address.c_str(), &name6.sin6_addr);
  if (only_there && !v6) inet_pton(AF_INET, address.c_str(), &name4.sin_addr);

  Socket socket(::socket(v6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  // A world that has just ended leaves connections in TIME_WAIT, which do not take the port.
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  const auto* name = v6 ? reinterpret_cast<sockaddr*>(&name6) : reinterpret_cast<sockaddr*>(&name4);
  const socklen_t length = v6 ? sizeof(name6) : sizeof(name4);
  if (socket.get() < 0 || ::bind(socket.get(), name, length) != 0 ||
      ::listen(socket.get(), SOMAXCONN) != 0) {
    return -1;
  }
  return socket.release();
}

std::string find_listener(const addrinfo* addresses, Clock::time_point deadline) {
  for (milliseconds pause{2};; pause = std::min(pause * 2, milliseconds(100))) {
    for (const addrinfo* address = addresses; address != nullptr; address = address->ai_next) {
      if (listens(*address)) return numeric(*address);
    }
    if (Clock::now() + pause > deadline) return "";
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace ppfsdp::start
