// Ranks are threads of this process, each with its own connection to the store that rank 0 serves.
#include "backends/start/meeting.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "backends/start/address.h"
#include "backends/start/testing/agent_store.h"
#include "src/comm/communicator.h"

namespace ppfsdp::start {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

/// Waited for only where a fault has no other end.
constexpr milliseconds kSoon{500};

/// A socket that listens on a free port.
int listen_somewhere(int& port) {
  sockaddr_in name{};
  name.sin_family = AF_INET;
  name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(name);
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  EXPECT_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&name), length), 0);
  EXPECT_EQ(::listen(fd, SOMAXCONN), 0);
  EXPECT_EQ(::getsockname(fd, reinterpret_cast<sockaddr*>(&name), &length), 0);
  port = ntohs(name.sin_port);
  return fd;
}

/// Ranks 0 to n - 1 of one world, with rank 0's socket open.
std::vector<MeetingOptions> world(int n) {
  std::vector<MeetingOptions> ranks(static_cast<size_t>(n));
  int port = 0;
  ranks[0].listen_fd = listen_somewhere(port);
  for (int rank = 0; rank < n; ++rank) {
    MeetingOptions& options = ranks[static_cast<size_t>(rank)];
    options.rank = rank;
    options.world_size = n;
    options.master_port = port;
    options.facts = {{"the build", "1a"}, {"training.steps", "3"}};
  }
  return ranks;
}

/// What each has to say in the end: "met", or its error. All stay until all have. `addresses`: by
/// which each is reached.
std::vector<std::string> meet_all(const std::vector<MeetingOptions>& ranks,
                                  std::vector<std::string>* addresses = nullptr) {
  std::vector<std::string> ends(ranks.size());
  std::vector<Meeting> meetings(ranks.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < ranks.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        meetings[i] = meet(ranks[i]);
        ends[i] = "met";
      } catch (const comm::CommError& error) {
        ends[i] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (addresses != nullptr) {
    for (const Meeting& meeting : meetings) addresses->push_back(meeting.address);
  }
  return ends;
}

/// Returns once all of `ranks` have come to the world of `options` and said what they have to say.
void wait_until_there(const MeetingOptions& options, const std::vector<int>& ranks) {
  c10d::TCPStoreOptions settings;
  settings.port = static_cast<uint16_t>(options.master_port);
  settings.waitWorkers = false;
  const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", settings);
  for (const int rank : ranks) {
    while (!store->check({"ppfsdp/0/hashes/" + std::to_string(rank)})) {
      std::this_thread::sleep_for(milliseconds(2));
    }
  }
}

std::string at(const MeetingOptions& options) {
  return "rendezvous at 127.0.0.1:" + std::to_string(options.master_port) + ": ";
}

TEST(Meeting, OfAllRanksGivesOneStore) {
  for (const int n : {1, 2, 3, 16}) {
    EXPECT_THAT(meet_all(world(n)), Each("met")) << n << " ranks";
  }
}

TEST(Meeting, TellsAllRanksWhatTheyDifferIn) {
  auto ranks = world(4);
  ranks[2].facts[1].value = "4";
  EXPECT_THAT(meet_all(ranks), Each(at(ranks[0]) + "ranks differ in training.steps: 3 on ranks 0, "
                                                   "1, 3; 4 on rank 2"));
  // The first difference is the most telling.
  ranks = world(3);
  ranks[0].facts[0].value = "2b";
  ranks[0].facts[1].value = "4";
  EXPECT_THAT(meet_all(ranks),
              Each(at(ranks[0]) + "ranks differ in the build: 1a on ranks 1, 2; 2b on rank 0"));
}

// The first two wait already; nobody else comes, and the timeout is longer than the test's.
TEST(Meeting, TellsAllRanksOfTwoProcessesWithOneRank) {
  auto ranks = world(3);
  ranks[2].rank = 1;
  EXPECT_THAT(meet_all(ranks),
              Each(at(ranks[0]) + "two processes came as rank 1 of 3; start each rank once, and "
                                  "give each run a MASTER_PORT of its own"));
}

TEST(Meeting, TellsAllRanksOfTwoRankZeros) {
  const auto ranks = world(3);
  std::vector<std::string> ends;
  std::thread early([&] { ends = meet_all({ranks[0], ranks[1]}); });
  wait_until_there(ranks[0], {0, 1});
  MeetingOptions twin = ranks[0];
  twin.listen_fd = -1;  // it finds the port taken
  EXPECT_THAT(meet_all({twin})[0], HasSubstr("two processes came as rank 0 of 3"));
  early.join();
  EXPECT_THAT(ends, Each(HasSubstr("two processes came as rank 0 of 3")));
}

TEST(Meeting, TellsAllRanksThatTheyDisagreeAboutTheWorld) {
  auto ranks = world(2);
  ranks[1].world_size = 3;
  EXPECT_THAT(meet_all(ranks),
              Each(AllOf(HasSubstr(at(ranks[0])), HasSubstr("was given a world of"))));
}

// Said by whoever is first to run out of time, to all: also to those who would wait much longer.
TEST(Meeting, TellsAllRanksWhoIsMissing) {
  auto ranks = world(5);
  std::vector<std::string> ends;
  std::thread early([&] { ends = meet_all({ranks[0], ranks[2]}); });
  wait_until_there(ranks[0], {0, 2});
  ranks[4].timeout = kSoon;
  const std::string last = meet_all({ranks[4]})[0];
  early.join();
  ends.push_back(last);
  EXPECT_EQ(ends.size(), 3u);
  EXPECT_THAT(ends, Each(at(ranks[0]) + "3 of 5 ranks came within 0.5 s; missing: 1, 3"));
}

// A rank that is one too many must not disturb those that have met, and must not stay.
TEST(Meeting, IsClosedOnceAllAreThere) {
  auto ranks = world(2);
  std::vector<Meeting> met(2);
  std::thread other([&] { met[1] = meet(ranks[1]); });
  met[0] = meet(ranks[0]);
  other.join();
  EXPECT_THAT(meet_all({ranks[1]})[0], HasSubstr("two processes came as rank 1 of 2"));
  ranks[1].world_size = 3;
  EXPECT_THAT(meet_all({ranks[1]})[0], HasSubstr("rank 1 was given a world of 3 ranks, rank "));
  ranks[0].listen_fd = -1;
  EXPECT_THAT(meet_all({ranks[0]})[0], HasSubstr("is in use by another process"));
  met[0].store->set("key", "value");
  EXPECT_EQ(met[1].store->get_to_str("key"), "value");
}

TEST(Meeting, SaysThatRankZeroDidNotCome) {
  auto ranks = world(2);
  ::close(ranks[0].listen_fd);
  ranks[1].timeout = kSoon;
  EXPECT_EQ(meet_all({ranks[1]})[0],
            "rendezvous: rank 1 of 2 found nobody listening at 127.0.0.1:" +
                std::to_string(ranks[1].master_port) + " within 0.5 s: rank 0 did not come");
}

// c10d's own client would wait for its greeting without end.
TEST(Meeting, WithAProgramThatSaysNothingEnds) {
  auto ranks = world(2);
  ranks[1].timeout = kSoon;
  EXPECT_EQ(meet_all({ranks[1]})[0],
            "rendezvous: what listens at 127.0.0.1:" + std::to_string(ranks[1].master_port) +
                " did not answer rank 1 of 2 as rank 0 does within 0.5 s; is the port another "
                "program's? set MASTER_PORT to a free one");
  MeetingOptions zero = ranks[0];
  zero.listen_fd = -1;
  EXPECT_EQ(meet_all({zero})[0],
            "rendezvous: port " + std::to_string(zero.master_port) +
                " of 127.0.0.1 is in use by another process; set MASTER_PORT to a free port");
  ::close(ranks[0].listen_fd);
}

TEST(Meeting, SaysThatAHostHasNoAddress) {
  for (const int rank : {0, 1}) {
    MeetingOptions options;
    options.rank = rank;
    options.world_size = 2;
    options.master_addr = "no-such-host.invalid";
    options.timeout = kSoon;
    EXPECT_THAT(meet_all({options})[0],
                HasSubstr("rendezvous: MASTER_ADDR 'no-such-host.invalid' has no address"));
  }
}

// As torchrun's agent does it. A world that is started again must not meet the dead one.
TEST(Meeting, InAStoreThatSomebodyElseServes) {
  auto ranks = world(3);
  const auto agent = testing::serve_agent_store(ranks[0].master_port, ranks[0].listen_fd);
  for (int attempt = 0; attempt < 2; ++attempt) {
    for (MeetingOptions& options : ranks) {
      options.listen_fd = -1;
      options.store_served = true;
      options.attempt = attempt;
    }
    EXPECT_THAT(meet_all(ranks), Each("met")) << "attempt " << attempt;
  }
  ranks[1].facts[0].value = "2b";
  for (MeetingOptions& options : ranks) options.attempt = 2;
  EXPECT_THAT(meet_all(ranks), Each(HasSubstr("ranks differ in the build")));
}

/// An IPv4 address of this machine by which others could reach it; empty if it has none.
std::string address_for_others() {
  ifaddrs* all = nullptr;
  EXPECT_EQ(getifaddrs(&all), 0);
  std::string found;
  for (const ifaddrs* at = all; at != nullptr && found.empty(); at = at->ifa_next) {
    if (at->ifa_addr == nullptr || at->ifa_addr->sa_family != AF_INET) continue;
    addrinfo info{};
    info.ai_addr = at->ifa_addr;
    info.ai_addrlen = sizeof(sockaddr_in);
    if (const std::string text = numeric(info); !is_loopback(text)) found = text;
  }
  freeifaddrs(all);
  return found;
}

// Its own machine may take rank 0's name for loopback: then what the others found is its address,
// since they could not connect to loopback.
TEST(Meeting, ARankIsReachedByTheAddressThatOthersKnow) {
  const std::string known = address_for_others();
  if (known.empty()) GTEST_SKIP() << "this machine has no address but loopback";
  std::vector<MeetingOptions> ranks = world(3);
  ::close(ranks[0].listen_fd);
  ranks[0].listen_fd = listen_at("127.0.0.1", 0, /*only_there=*/false);
  sockaddr_in name{};
  socklen_t length = sizeof(name);
  ::getsockname(ranks[0].listen_fd, reinterpret_cast<sockaddr*>(&name), &length);
  for (MeetingOptions& options : ranks) options.master_port = ntohs(name.sin_port);
  ranks[2].master_addr = known;
  std::vector<std::string> addresses;
  EXPECT_THAT(meet_all(ranks, &addresses), Each("met"));
  EXPECT_THAT(addresses, Each(known));
}

TEST(Meeting, RanksOfOneMachineAreReachedByLoopback) {
  std::vector<std::string> addresses;
  EXPECT_THAT(meet_all(world(2), &addresses), Each("met"));
  EXPECT_THAT(addresses, Each("127.0.0.1"));
}

TEST(Meeting, TakesItsPlaceFromTheLauncher) {
  MeetingOptions options;
  options.take({.launcher = "torchrun",
                .rank = 3,
                .world_size = 8,
                .local_rank = 1,
                .local_world_size = 2,
                .master_addr = "a",
                .master_port = 17,
                .store_served = true,
                .attempt = 4});
  EXPECT_EQ(options.rank, 3);
  EXPECT_EQ(options.world_size, 8);
  EXPECT_EQ(options.master_addr, "a");
  EXPECT_EQ(options.master_port, 17);
  EXPECT_TRUE(options.store_served);
  EXPECT_EQ(options.attempt, 4);
}

TEST(Address, ListensOnLoopbackAloneWhereThatIsMeant) {
  const auto bound_to = [](const std::string& address) {
    const int fd = listen_at(address, 0, means_this_machine(address));
    sockaddr_in name{};
    socklen_t length = sizeof(name);
    ::getsockname(fd, reinterpret_cast<sockaddr*>(&name), &length);
    ::close(fd);
    return ntohl(name.sin_addr.s_addr);
  };
  EXPECT_EQ(bound_to("127.0.0.1"), static_cast<uint32_t>(INADDR_LOOPBACK));
  EXPECT_EQ(bound_to("192.0.2.7"), static_cast<uint32_t>(INADDR_ANY));
  // Debian's own name of the machine, which others know by an address that they reach.
  const int fd = listen_at("127.0.1.1", 0, means_this_machine("node-0"));
  sockaddr_in name{};
  socklen_t length = sizeof(name);
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&name), &length);
  ::close(fd);
  EXPECT_EQ(ntohl(name.sin_addr.s_addr), static_cast<uint32_t>(INADDR_ANY));
  EXPECT_TRUE(means_this_machine("localhost"));
  EXPECT_TRUE(is_loopback("127.0.1.1"));
  EXPECT_TRUE(is_loopback("::1"));
  EXPECT_FALSE(is_loopback("10.0.0.1"));
}

}  // namespace
}  // namespace ppfsdp::start
