#include "backends/start/build_id.h"

#include <fmt/format.h>
#include <link.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string_view>
#include <vector>

#include "src/comm/call.h"

namespace ppfsdp::start {
namespace {

/// The linker's build id among the notes of a loaded file; empty if it has none.
std::string_view linkers_id(const dl_phdr_info& file, const ElfW(Phdr) & segment) {
  const char* at = reinterpret_cast<const char*>(file.dlpi_addr + segment.p_vaddr);
  const char* end = at + segment.p_memsz;
  const auto padded = [](size_t size) { return (size + 3) / 4 * 4; };
  while (at + sizeof(ElfW(Nhdr)) <= end) {
    ElfW(Nhdr) note;
    std::memcpy(&note, at, sizeof(note));
    const char* name = at + sizeof(note);
    const char* value = name + padded(note.n_namesz);
    at = value + padded(note.n_descsz);
    if (at > end) break;
    if (note.n_type == NT_GNU_BUILD_ID &&
        std::string_view(name, note.n_namesz) == std::string_view("GNU", sizeof("GNU"))) {
      return {value, note.n_descsz};
    }
  }
  return {};
}

int add_library(dl_phdr_info* file, size_t, void* data) {
  auto& libraries = *static_cast<std::vector<std::string>*>(data);
  const std::string_view path = file->dlpi_name;
  std::string text(path.substr(path.rfind('/') + 1));
  const auto is_of = [&](const char* part) { return text.find(part) != std::string::npos; };
  if (!is_of("torch") && !is_of("c10") && !is_of("nccl")) return 0;
  for (int i = 0; i < file->dlpi_phnum; ++i) {
    if (file->dlpi_phdr[i].p_type == PT_NOTE) text += linkers_id(*file, file->dlpi_phdr[i]);
  }
  libraries.push_back(std::move(text));
  return 0;
}

std::string compute() {
  std::ostringstream bytes;
  bytes << std::ifstream("/proc/self/exe", std::ios::binary).rdbuf();
  std::vector<std::string> libraries;
  dl_iterate_phdr(&add_library, &libraries);
  // They may have been loaded in any order.
  std::ranges::sort(libraries);
  std::string all;
  for (const std::string& library : libraries) all += library;
  return fmt::format("{:016x} with LibTorch {} {:016x}", comm::hash(bytes.str()), TORCH_VERSION,
                     comm::hash(all));
}

}  // namespace

const std::string& build_id() {
  static const std::string id = compute();
  return id;
}

}  // namespace ppfsdp::start
