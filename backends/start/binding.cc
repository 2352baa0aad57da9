#include "backends/start/binding.h"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string_view>
#include <vector>

#include "backends/start/launcher.h"

namespace ppfsdp::start {
namespace {

namespace fs = std::filesystem;

/// The first line of a file; empty if there is none.
std::string first_line_of(const std::string& path) {
  std::string line;
  std::getline(std::ifstream(path), line);
  return line;
}

/// As sysfs writes it: lower case, four digits of domain.
std::string sysfs_id(std::string id) {
  std::ranges::transform(id, id.begin(), [](unsigned char c) { return std::tolower(c); });
  const size_t colon = id.find(':');
  if (colon == 8 && id.starts_with("0000")) id.erase(0, 4);
  return id;
}

/// "0-3,8".
std::optional<cpu_set_t> parse_cpus(std::string_view list) {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  while (true) {
    const std::string_view item = list.substr(0, list.find(','));
    const std::string_view low = item.substr(0, item.find('-'));
    const std::string_view high = low.size() == item.size() ? low : item.substr(low.size() + 1);
    const std::optional<int64_t> from = parse_integer(low, 0, CPU_SETSIZE - 1);
    const std::optional<int64_t> to = parse_integer(high, 0, CPU_SETSIZE - 1);
    if (!from || !to) return std::nullopt;
    for (int64_t cpu = *from; cpu <= *to; ++cpu) CPU_SET(static_cast<size_t>(cpu), &cpus);
    if (item.size() == list.size()) return cpus;
    list.remove_prefix(item.size() + 1);
  }
}

/// The opposite.
std::string list_cpus(const cpu_set_t& cpus) {
  std::string list;
  for (size_t cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &cpus)) continue;
    size_t last = cpu;
    while (last + 1 < CPU_SETSIZE && CPU_ISSET(last + 1, &cpus)) ++last;
    list += fmt::format("{}{}", list.empty() ? "" : ",", cpu);
    if (last > cpu) list += fmt::format("-{}", last);
    cpu = last;
  }
  return list;
}

/// The ids of this process's threads.
std::vector<pid_t> threads() {
  std::vector<pid_t> ids;
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator("/proc/self/task", ignored)) {
    const std::optional<int64_t> id = parse_integer(entry.path().filename().string(), 1, 1 << 30);
    if (id) ids.push_back(static_cast<pid_t>(*id));
  }
  return ids;
}

std::string not_bound(const std::string& reason) { return "not bound to a NUMA node: " + reason; }

}  // namespace

NumaCpus numa_cpus(const std::string& pci_bus_id, const std::string& sysfs) {
  NumaCpus cpus;
  const std::string id = sysfs_id(pci_bus_id);
  const std::string node_file = fmt::format("{}/bus/pci/devices/{}/numa_node", sysfs, id);
  const std::string node = first_line_of(node_file);
  const std::optional<int64_t> number = parse_integer(node, 0, 1 << 20);
  if (!number) {
    cpus.reason = node.empty() ? fmt::format("there is no {}", node_file)
                               : fmt::format("{} says '{}'", node_file, node);
    return cpus;
  }
  const std::string list_file =
      fmt::format("{}/devices/system/node/node{}/cpulist", sysfs, *number);
  const std::string list = first_line_of(list_file);
  if (list.empty()) {
    cpus.reason = fmt::format("{} names no CPUs", list_file);
    return cpus;
  }
  cpus.node = static_cast<int>(*number);
  cpus.list = list;
  return cpus;
}

std::string bind_to_gpu(const std::string& pci_bus_id, const std::string& sysfs) {
  const NumaCpus near = numa_cpus(pci_bus_id, sysfs);
  if (near.list.empty()) return not_bound(near.reason);
  const std::optional<cpu_set_t> wanted = parse_cpus(near.list);
  if (!wanted) {
    return not_bound(fmt::format("node {}'s CPUs are no list: '{}'", near.node, near.list));
  }
  cpu_set_t allowed, both;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) {
    return not_bound(fmt::format("the CPUs allowed are unknown: {}", std::strerror(errno)));
  }
  CPU_AND(&both, &allowed, &*wanted);
  if (CPU_COUNT(&both) == 0) {
    return not_bound(fmt::format("none of node {}'s CPUs {} is allowed (allowed: {})", near.node,
                                 near.list, list_cpus(allowed)));
  }
  // This thread first: what the others start meanwhile may be missed, what it starts may not.
  if (sched_setaffinity(0, sizeof(both), &both) != 0) {
    return not_bound(fmt::format("the system refuses: {}", std::strerror(errno)));
  }
  // A thread that has ended since it was listed needs nothing.
  for (const pid_t id : threads()) sched_setaffinity(id, sizeof(both), &both);
  return fmt::format("bound to CPUs {} of NUMA node {}", list_cpus(both), near.node);
}

}  // namespace ppfsdp::start
