#include "backends/start/meeting.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <future>
#include <memory>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "backends/start/address.h"
#include "src/comm/communicator.h"
#include "src/comm/text.h"

namespace ppfsdp::start {
namespace {

using comm::CommError;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// How long rank 0 stays for the others, and they for a verdict that is being written.
constexpr milliseconds kGrace{2000};
/// How long rank 0 looks for the address of its own machine.
constexpr milliseconds kOwnName{30000};

// What the store holds. A rank writes its own hashes and facts; everything else is counted or
// written once, by whoever is first.
constexpr const char* kWorld = "world";      ///< "SIZE RANK": the world as the first rank knows it
constexpr const char* kArrived = "arrived";  ///< processes that have come
constexpr const char* kReady = "ready";      ///< ranks that have written what they have to say
constexpr const char* kLate = "late";        ///< ranks whose time is up
constexpr const char* kVerdict = "verdict";  ///< kAgreed, or what is wrong
constexpr const char* kMaster = "master";    ///< rank 0's IP address as another machine sees it
constexpr const char* kHeard = "heard";      ///< processes that have read the verdict
constexpr const char* kAgreed = "agreed";

std::string rank_key(int rank) { return fmt::format("rank/{}", rank); }
std::string hashes_key(int rank) { return fmt::format("hashes/{}", rank); }
std::string facts_key(int rank) { return fmt::format("facts/{}", rank); }

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }
std::string text_of(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

std::string where(const MeetingOptions& options) {
  return fmt::format("{}:{}", options.master_addr, options.master_port);
}

milliseconds left_until(Clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
  return std::max(left, milliseconds(1));
}

/// Opens the store. c10d waits without end for a greeting from what listens there, and what listens
/// may be anything: it waits on a thread of its own, which is left behind if that does not come.
StorePtr open_store(const MeetingOptions& options, const std::string& address, int listen_fd,
                    Clock::time_point deadline) {
  c10d::TCPStoreOptions settings;
  settings.port = static_cast<uint16_t>(options.master_port);
  settings.isServer = listen_fd >= 0;
  if (listen_fd >= 0) settings.masterListenFd = listen_fd;
  settings.waitWorkers = false;
  settings.timeout = left_until(deadline);
  auto promise = std::make_shared<std::promise<StorePtr>>();
  std::future<StorePtr> opened = promise->get_future();
  std::thread([promise, settings, address] {
    try {
      promise->set_value(c10::make_intrusive<c10d::TCPStore>(address, settings));
    } catch (...) {
      promise->set_exception(std::current_exception());
    }
  }).detach();
  // The store has its own deadline for all but that greeting: let it say what is wrong.
  if (opened.wait_until(deadline + kGrace / 4) != std::future_status::ready) {
    throw CommError(fmt::format(
        "rendezvous: what listens at {} did not answer rank {} of {} as rank 0 does within {}; is "
        "the port another program's? set MASTER_PORT to a free one",
        where(options), options.rank, options.world_size, comm::seconds(options.timeout)));
  }
  const StorePtr store = opened.get();
  store->setTimeout(options.timeout);
  return c10::make_intrusive<c10d::PrefixStore>(fmt::format("ppfsdp/{}", options.attempt), store);
}

/// What ranks tell each other through the store.
class Agreement {
 public:
  Agreement(const MeetingOptions& options, c10d::Store& store) : options_(options), store_(store) {}

  /// Tells the others where this rank sees the master, for those who see it as loopback.
  void found_master_at(const std::string& address) { master_ = address; }

  /// Where other machines see the master, once all ranks have come; empty when there are none.
  std::string master_elsewhere() {
    return store_.check({kMaster}) ? text_of(store_.get(kMaster)) : "";
  }

  /// Returns once all are here and agree; throws the verdict on every rank if not.
  void reach(Clock::time_point deadline) {
    const std::string verdict = verdict_by(deadline);
    store_.add(kHeard, 1);
    if (verdict == kAgreed) return;
    if (options_.rank == 0 && !options_.store_served) wait_for_readers();
    throw CommError(fmt::format("rendezvous at {}: {}", where(options_), verdict));
  }

  /// Tells all that another process came as this rank; whether they are still to be told.
  bool tell_of_twin() { return give(twin()) != kAgreed; }

  std::string twin() const {
    return fmt::format(
        "two processes came as rank {} of {}; start each rank once, and give each run a "
        "MASTER_PORT "
        "of its own",
        options_.rank, options_.world_size);
  }

 private:
  /// Gives a verdict, unless there is one; returns the one that holds.
  std::string give(const std::string& verdict) {
    return text_of(store_.compareSet(kVerdict, {}, bytes_of(verdict)));
  }

  std::string verdict_by(Clock::time_point deadline) {
    if (const std::optional<std::string> fault = join()) {
      const std::string verdict = give(*fault);
      // The world is complete without this process, which must not be in it.
      return verdict == kAgreed ? *fault : verdict;
    }
    if (store_.add(kReady, 1) == options_.world_size) return give(judge());
    try {
      store_.wait({kVerdict}, left_until(deadline));
    } catch (const c10::DistStoreError&) {
      // The time is up. Whoever is first to find so says who is missing, to all.
      if (store_.add(kLate, 1) == 1) return give(who_is_missing());
      store_.wait({kVerdict}, kGrace);
    }
    return text_of(store_.get(kVerdict));
  }

  /// Says that this rank is here, and what it has to say. Returns a fault of the world's that shows
  /// at once.
  std::optional<std::string> join() {
    store_.add(kArrived, 1);
    const std::string mine = fmt::format("{} {}", options_.world_size, options_.rank);
    const std::string first = text_of(store_.compareSet(kWorld, {}, bytes_of(mine)));
    const size_t space = first.find(' ');
    if (first.substr(0, space) != std::to_string(options_.world_size)) {
      return fmt::format("rank {} was given a world of {} ranks, rank {} one of {}", options_.rank,
                         options_.world_size, first.substr(space + 1), first.substr(0, space));
    }
    if (store_.add(rank_key(options_.rank), 1) != 1) return twin();
    std::vector<std::string> keys = {hashes_key(options_.rank), facts_key(options_.rank)};
    std::vector<std::vector<uint8_t>> values = {encode_hashes(options_.facts),
                                                encode_facts(options_.facts)};
    if (!master_.empty()) {
      keys.push_back(kMaster);
      values.push_back(bytes_of(master_));
    }
    store_.multiSet(keys, values);
    return std::nullopt;
  }

  /// The verdict on what all ranks have said.
  std::string judge() {
    std::vector<std::string> keys;
    for (int rank = 0; rank < options_.world_size; ++rank) keys.push_back(hashes_key(rank));
    const std::optional<Difference> difference = find_difference(store_.multiGet(keys));
    if (!difference) return kAgreed;
    std::vector<std::vector<Fact>> facts;
    for (const std::vector<int>& group : difference->groups) {
      if (facts.size() == kShownGroups) break;
      facts.push_back(decode_facts(store_.get(facts_key(group[0]))));
    }
    return describe(*difference, facts);
  }

  /// "2 of 4 ranks came within 5 s; missing: 1, 3".
  std::string who_is_missing() {
    std::vector<int> missing;
    for (int rank = 0; rank < options_.world_size; ++rank) {
      if (!store_.check({hashes_key(rank)})) missing.push_back(rank);
    }
    const size_t came = options_.world_size - missing.size();
    if (missing.empty()) {
      return fmt::format("all {} ranks came, but the last ended before it compared them", came);
    }
    return fmt::format("{} of {} ranks came within {}; missing: {}", came, options_.world_size,
                       comm::seconds(options_.timeout), list_ranks(missing));
  }

  void wait_for_readers() {
    const Clock::time_point deadline = Clock::now() + kGrace;
    while (store_.add(kHeard, 0) < store_.add(kArrived, 0) && Clock::now() < deadline) {
      std::this_thread::sleep_for(milliseconds(5));
    }
  }

  const MeetingOptions& options_;
  c10d::Store& store_;
  std::string master_;  ///< empty for loopback
};

/// Rank 0's socket, at the first of the master's addresses that is this machine's; `address`
/// becomes that. When the port is taken it may be by another rank 0 of this world.
int open_port(const MeetingOptions& options, const addrinfo* addresses, std::string& address) {
  int error = EADDRNOTAVAIL;
  for (const addrinfo* at = addresses; at != nullptr; at = at->ai_next) {
    address = numeric(*at);
    const int listener =
        listen_at(address, options.master_port, means_this_machine(options.master_addr));
    if (listener >= 0) return listener;
    error = errno;
    // "localhost" may have an address of a protocol that this machine does not speak.
    if (error != EADDRNOTAVAIL && error != EAFNOSUPPORT) break;
  }
  if (error != EADDRINUSE) {
    throw CommError(fmt::format("rendezvous: rank 0 cannot listen at {}: {}", where(options),
                                std::strerror(error)));
  }
  std::string twin;
  try {
    const Clock::time_point deadline = Clock::now() + std::min(options.timeout, kGrace / 2);
    const StorePtr store = open_store(options, address, /*listen_fd=*/-1, deadline);
    Agreement agreement(options, *store);
    if (agreement.tell_of_twin()) twin = agreement.twin();
  } catch (const std::exception&) {
    // It is no rank 0 that listens there.
  }
  if (!twin.empty()) throw CommError(fmt::format("rendezvous at {}: {}", where(options), twin));
  throw CommError(fmt::format(
      "rendezvous: port {} of {} is in use by another process; set MASTER_PORT to a free port",
      options.master_port, options.master_addr));
}

}  // namespace

void MeetingOptions::take(const Launched& launched) {
  rank = launched.rank;
  world_size = launched.world_size;
  master_addr = launched.master_addr;
  master_port = launched.master_port;
  store_served = launched.store_served;
  attempt = launched.attempt;
}

void MeetingOptions::check(const char* backend) const {
  TORCH_CHECK(world_size >= 1, backend, ": world_size must be at least 1, got ", world_size);
  TORCH_CHECK(rank >= 0 && rank < world_size, backend, ": rank must be in [0, ", world_size,
              "), got ", rank);
  TORCH_CHECK(master_port >= 1 && master_port <= 65535, backend,
              ": master_port must be in [1, 65535], got ", master_port);
  TORCH_CHECK(timeout.count() > 0, backend, ": timeout must be positive, got ", timeout.count(),
              " ms");
}

Meeting meet(const MeetingOptions& options) {
  const Clock::time_point deadline = Clock::now() + options.timeout;
  const bool serves = options.rank == 0 && !options.store_served;
  const Addresses addresses =
      resolve(options.master_addr, options.master_port,
              serves ? std::min(deadline, Clock::now() + kOwnName) : deadline);
  std::string master;
  int listener = -1;
  if (serves) {
    master = numeric(*addresses);
    listener =
        options.listen_fd >= 0 ? options.listen_fd : open_port(options, addresses.get(), master);
  } else {
    master = find_listener(addresses.get(), deadline);
    if (master.empty()) {
      throw CommError(fmt::format(
          "rendezvous: rank {} of {} found nobody listening at {} within {}: {} did not come",
          options.rank, options.world_size, where(options), comm::seconds(options.timeout),
          options.store_served ? "the launcher's store" : "rank 0"));
    }
  }
  Meeting meeting;
  try {
    meeting.store = open_store(options, master, listener, deadline);
    Agreement agreement(options, *meeting.store);
    meeting.address = source_towards(master);
    if (!is_loopback(meeting.address)) agreement.found_master_at(master);
    agreement.reach(deadline);
    if (is_loopback(meeting.address)) {
      // This rank is on the master's machine, whose name may be loopback there alone.
      const std::string elsewhere = agreement.master_elsewhere();
      if (!elsewhere.empty()) meeting.address = elsewhere;
    }
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
