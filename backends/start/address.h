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

/// Whether whoever uses a host's name or address means the machine that it runs on. A machine's own
/// name does not, although the machine itself may take it for loopback (Debian's 127.0.1.1).
bool means_this_machine(const std::string& host);

/// This machine's IP address on the way to the IP address `address`: what a connection to it would
/// come from. Empty when there is no way.
std::string source_towards(const std::string& address);

/// A socket that listens on `port`: at the IP address `address` alone when `only_there`, else at
/// all addresses of its kind, since it may be one that only other machines see. -1, with errno,
/// when that is not possible (EADDRINUSE: the port is taken).
int listen_at(const std::string& address, int port, bool only_there);

/// The first of `addresses` at which somebody listens, as soon as somebody does; empty after the
/// deadline.
std::string find_listener(const addrinfo* addresses,
                          std::chrono::steady_clock::time_point deadline);

}  // namespace ppfsdp::start
