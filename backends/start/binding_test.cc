#include "backends/start/binding.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <latch>
#include <thread>

namespace ppfsdp::start {
namespace {

namespace fs = std::filesystem;

cpu_set_t affinity() {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  sched_getaffinity(0, sizeof(cpus), &cpus);
  return cpus;
}

/// A sysfs of our own, with one GPU; the process's CPUs are as before afterwards.
class BindingTest : public testing::Test {
 protected:
  void SetUp() override {
    before_ = affinity();
    root_ = fs::temp_directory_path() / fmt::format("binding_test.{}", getpid());
    fs::remove_all(root_);
  }
  void TearDown() override {
    sched_setaffinity(0, sizeof(before_), &before_);
    fs::remove_all(root_);
  }

  void write(const std::string& name, const std::string& text) const {
    fs::create_directories((root_ / name).parent_path());
    std::ofstream(root_ / name) << text;
  }
  void gpu_on_node(const std::string& node) const {
    write("bus/pci/devices/0000:3b:00.0/numa_node", node + "\n");
  }
  void node_has(int node, const std::string& cpus) const {
    write(fmt::format("devices/system/node/node{}/cpulist", node), cpus + "\n");
  }
  std::string bind(const std::string& id = "0000:3B:00.0") const {
    return bind_to_gpu(id, root_.string());
  }
  /// bind() must not have changed anything.
  void expect_unchanged() const {
    const cpu_set_t now = affinity();
    EXPECT_TRUE(CPU_EQUAL(&now, &before_));
  }
  size_t a_cpu() const {
    for (size_t cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &before_)) return cpu;
    }
    return 0;
  }

  cpu_set_t before_;
  fs::path root_;
};

TEST_F(BindingTest, NodeOfAGpuByTheNamesThatToolsGiveIt) {
  gpu_on_node("1");
  node_has(1, "16-31,48-63");
  for (const char* id : {"0000:3B:00.0", "0000:3b:00.0", "00000000:3B:00.0"}) {
    const NumaCpus cpus = numa_cpus(id, root_.string());
    EXPECT_EQ(cpus.node, 1) << id;
    EXPECT_EQ(cpus.list, "16-31,48-63") << id;
    EXPECT_EQ(cpus.reason, "") << id;
  }
}

// Threads that were there before are bound too: LibTorch has started some by then.
TEST_F(BindingTest, BindsAllThreadsToTheCpusAllowed) {
  const size_t cpu = a_cpu();
  gpu_on_node("1");
  // More than this machine has: what is not allowed is left out.
  node_has(1, fmt::format("{},1020-1023", cpu));
  std::latch bound(1);
  int count = 0;
  std::thread before([&] {
    bound.wait();
    const cpu_set_t now = affinity();
    count = CPU_COUNT(&now);
  });
  EXPECT_EQ(bind(), fmt::format("bound to CPUs {} of NUMA node 1", cpu));
  bound.count_down();
  before.join();
  EXPECT_EQ(count, 1);
  cpu_set_t now = affinity();
  EXPECT_EQ(CPU_COUNT(&now), 1);
  EXPECT_TRUE(CPU_ISSET(cpu, &now));
  std::thread([&] { now = affinity(); }).join();
  EXPECT_EQ(CPU_COUNT(&now), 1) << "a thread that is started later";
}

TEST_F(BindingTest, LeavesThreadsWhereTheSystemSaysNothing) {
  EXPECT_EQ(bind(), fmt::format("not bound to a NUMA node: there is no {}/bus/pci/devices/"
                                "0000:3b:00.0/numa_node",
                                root_.string()));
  gpu_on_node("-1");  // a machine of one node
  EXPECT_NE(bind().find("numa_node says '-1'"), std::string::npos) << bind();
  gpu_on_node("3");
  EXPECT_NE(bind().find("node3/cpulist names no CPUs"), std::string::npos) << bind();
  node_has(3, "");
  EXPECT_NE(bind().find("node3/cpulist names no CPUs"), std::string::npos) << bind();
  node_has(3, "0-");
  EXPECT_NE(bind().find("node 3's CPUs are no list: '0-'"), std::string::npos) << bind();
  node_has(3, "1023");
  EXPECT_NE(bind().find("none of node 3's CPUs 1023 is allowed"), std::string::npos) << bind();
  expect_unchanged();
}

}  // namespace
}  // namespace ppfsdp::start
