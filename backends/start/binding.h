#pragma once

#include <string>

namespace ppfsdp::start {

/// The CPUs nearest to a PCI device.
struct NumaCpus {
  int node = -1;
  /// As in "0-15,32-47"; empty when the system does not say.
  std::string list;
  /// Why it is empty.
  std::string reason;
};

/// Reads SYSFS/bus/pci/devices/ID/numa_node and SYSFS/devices/system/node/nodeN/cpulist.
/// `pci_bus_id`: as CUDA and nvidia-smi write it ("0000:3B:00.0", "00000000:3B:00.0").
NumaCpus numa_cpus(const std::string& pci_bus_id, const std::string& sysfs = "/sys");

/// Lets the threads of this process (those it has, and those they start from now on) run on those
/// CPUs near the GPU alone that they may run on already; memory follows, as Linux takes it from the
/// node of the thread that first writes to it. Returns one line for the log: "bound to CPUs 0-15
/// of NUMA node 0", or "not bound to a NUMA node: " and why, and then nothing has changed. Never
/// fails.
std::string bind_to_gpu(const std::string& pci_bus_id, const std::string& sysfs = "/sys");

}  // namespace ppfsdp::start
