#pragma once

#include <netdb.h>

#include <chrono>
#include <memory>
#include <string>

namespace ppfsdp::start {

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

/// Whether an IP address is of the loopback interface.
bool is_loopback(const std::string& address);

/// The addresses of a host, in the order in which the system prefers them. CommError if it has none
/// at the deadline: a pod's name, for one, gets its address when the pod has started.
Addresses resolve(const std::string& host, int port,
                  std::chrono::steady_clock::time_point deadline);

/// As an IP address.
std::string numeric(const addrinfo& address);

/// A socket that listens on `port`: on the loopback interface alone when that is what `address`
/// is, else on all, since it may be an address that only other machines see. -1, with errno, when
/// that is not possible (EADDRINUSE: the port is taken).
int listen_at(const std::string& address, int port);

/// The first of `addresses` at which somebody listens, as soon as somebody does; empty after the
/// deadline.
std::string find_listener(const addrinfo* addresses,
                          std::chrono::steady_clock::time_point deadline);

}  // namespace ppfsdp::start
