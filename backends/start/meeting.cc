#include "backends/start/meeting.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>
#include <vector>

#include "src/comm/communicator.h"
#include "src/comm/text.h"

namespace ppfsdp::start {
namespace {

using comm::CommError;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

class Socket {
 public:
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket() {
    if (fd_ >= 0) ::close(fd_);
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

std::string where(const MeetingOptions& options) {
  return fmt::format("{}:{}", options.master_addr, options.master_port);
}

/// The addresses of the master, in the order in which the system prefers them.
Addresses resolve(const MeetingOptions& options) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const std::string port = std::to_string(options.master_port);
  const int error = getaddrinfo(options.master_addr.c_str(), port.c_str(), &hints, &found);
  if (error != 0) {
    throw CommError(fmt::format("rendezvous: MASTER_ADDR '{}' has no address: {}",
                                options.master_addr, gai_strerror(error)));
  }
  return Addresses(found, &freeaddrinfo);
}

std::string numeric(const addrinfo& address) {
  char host[NI_MAXHOST];
  const int error = getnameinfo(address.ai_addr, address.ai_addrlen, host, sizeof(host), nullptr, 0,
                                NI_NUMERICHOST);
  return error == 0 ? host : std::string();
}

/// Opens master_port: on the loopback interface alone when that is what master_addr names, else on
/// all, since master_addr may be an address that only other machines see.
int listen_at(const MeetingOptions& options, const std::string& address) {
  const bool loopback = is_loopback(address);
  const bool v6 = address.find(':') != std::string::npos;
  sockaddr_in6 name6{};
  name6.sin6_family = AF_INET6;
  name6.sin6_port = htons(static_cast<uint16_t>(options.master_port));
  name6.sin6_addr = loopback ? in6addr_loopback : in6addr_any;
  sockaddr_in name4{};
  name4.sin_family = AF_INET;
  name4.sin_port = name6.sin6_port;
  name4.sin_addr.s_addr = htonl(INADDR_ANY);
  if (loopback && !v6) inet_pton(AF_INET, address.c_str(), &name4.sin_addr);

  Socket socket(::socket(v6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  // A world that has just ended leaves connections in TIME_WAIT, which do not take the port.
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  const auto* name = v6 ? reinterpret_cast<sockaddr*>(&name6) : reinterpret_cast<sockaddr*>(&name4);
  const socklen_t length = v6 ? sizeof(name6) : sizeof(name4);
  if (socket.get() < 0 || ::bind(socket.get(), name, length) != 0 ||
      ::listen(socket.get(), SOMAXCONN) != 0) {
    const int error = errno;
    if (error == EADDRINUSE) {
      throw CommError(fmt::format(
          "rendezvous: port {} of {} is in use by another process; set MASTER_PORT to a free port",
          options.master_port, options.master_addr));
    }
    throw CommError(fmt::format("rendezvous: rank 0 cannot listen at {}: {}", where(options),
                                std::strerror(error)));
  }
  return socket.release();
}

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

/// The address at which rank 0 listens, as soon as it does.
std::string find_listener(const MeetingOptions& options, const addrinfo* addresses,
                          Clock::time_point deadline) {
  for (milliseconds pause{2};; pause = std::min(pause * 2, milliseconds(100))) {
    for (const addrinfo* address = addresses; address != nullptr; address = address->ai_next) {
      if (listens(*address)) return numeric(*address);
    }
    if (Clock::now() + pause > deadline) {
      throw CommError(fmt::format(
          "rendezvous: rank {} of {} found nobody listening at {} within {}: rank 0 did not come",
          options.rank, options.world_size, where(options), comm::seconds(options.timeout)));
    }
    std::this_thread::sleep_for(pause);
  }
}

std::string key_of(int rank) { return fmt::format("ppfsdp/rank/{}", rank); }
constexpr const char* kCount = "ppfsdp/count";
constexpr const char* kAll = "ppfsdp/all";
constexpr const char* kWorld = "ppfsdp/world";

/// Says that this rank is here, and that it is the last if it is.
void join(const MeetingOptions& options, c10d::Store& store) {
  const std::string world = std::to_string(options.world_size);
  const std::vector<uint8_t> mine(world.begin(), world.end());
  const std::vector<uint8_t> agreed = store.compareSet(kWorld, {}, mine);
  if (agreed != mine) {
    throw CommError(fmt::format(
        "rendezvous at {}: rank {} was given a world of {} ranks, an earlier rank one of {}",
        where(options), options.rank, world, std::string(agreed.begin(), agreed.end())));
  }
  if (store.add(key_of(options.rank), 1) != 1) {
    throw CommError(fmt::format("rendezvous at {}: two processes came as rank {} of {}",
                                where(options), options.rank, options.world_size));
  }
  if (store.add(kCount, 1) == options.world_size) store.set(kAll, std::vector<uint8_t>{1});
}

/// "2 of 4 ranks came within 5 s; missing: 1, 3".
std::string who_is_missing(const MeetingOptions& options, c10d::Store& store) {
  std::vector<int> missing;
  for (int rank = 0; rank < options.world_size; ++rank) {
    if (!store.check({key_of(rank)})) missing.push_back(rank);
  }
  return fmt::format("{} of {} ranks came within {}; missing: {}",
                     options.world_size - missing.size(), options.world_size,
                     comm::seconds(options.timeout), fmt::join(missing, ", "));
}

void wait_for_all(const MeetingOptions& options, c10d::Store& store, Clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
  try {
    store.wait({kAll}, std::max(left, milliseconds(1)));
  } catch (const c10::DistStoreError&) {
    // The time is up: say who is missing below. When rank 0 has given up, the store is gone too,
    // and that throws something else.
    throw CommError(
        fmt::format("rendezvous at {}: {}", where(options), who_is_missing(options, store)));
  }
}

}  // namespace

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address == "::1" || address.starts_with("::ffff:127.");
}

Meeting meet(const MeetingOptions& options) {
  const Clock::time_point deadline = Clock::now() + options.timeout;
  const Addresses addresses = resolve(options);
  c10d::TCPStoreOptions settings;
  settings.port = static_cast<uint16_t>(options.master_port);
  settings.isServer = options.rank == 0;
  settings.waitWorkers = false;
  settings.timeout = options.timeout;

  Meeting meeting;
  if (options.rank == 0) {
    meeting.address = numeric(*addresses);
    settings.masterListenFd =
        options.listen_fd >= 0 ? options.listen_fd : listen_at(options, meeting.address);
  } else {
    meeting.address = find_listener(options, addresses.get(), deadline);
  }
  try {
    meeting.store = c10::make_intrusive<c10d::TCPStore>(meeting.address, settings);
    join(options, *meeting.store);
    wait_for_all(options, *meeting.store, deadline);
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& error) {
    throw CommError(fmt::format("rendezvous at {}: rank {} of {} lost the connection to rank 0: {}",
                                where(options), options.rank, options.world_size,
                                comm::first_line(error.what())));
  }
  return meeting;
}

}  // namespace ppfsdp::start
