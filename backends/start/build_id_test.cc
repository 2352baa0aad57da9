// Compares builds as ranks do: this program runs copies of itself, which print their build ids.
#include "backends/start/build_id.h"

#include <gtest/gtest.h>
#include <torch/headeronly/version.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>

namespace ppfsdp::start {
namespace {

namespace fs = std::filesystem;

std::string id_of(const fs::path& program) {
  const std::string command = program.string() + " --print-build-id";
  std::FILE* pipe = popen(command.c_str(), "r");
  char line[256] = {};
  if (pipe == nullptr || std::fgets(line, sizeof(line), pipe) == nullptr) return "no output";
  return pclose(pipe) == 0 ? line : "failed";
}

TEST(BuildId, IsEqualForEqualFilesAndChangesWithThem) {
  EXPECT_NE(build_id().find("LibTorch " TORCH_VERSION), std::string::npos) << build_id();
  // A copy beside the original, where it finds its libraries.
  const fs::path original = fs::read_symlink("/proc/self/exe");
  const fs::path copy = original.string() + "." + std::to_string(getpid());
  fs::copy_file(original, copy);
  EXPECT_EQ(id_of(original), build_id());
  EXPECT_EQ(id_of(copy), build_id()) << "the place of a file does not count";
  fs::permissions(copy, fs::perms::owner_all);
  std::ofstream(copy, std::ios::binary | std::ios::app) << '\0';
  const std::string other = id_of(copy);
  fs::remove(copy);
  EXPECT_NE(other, build_id()) << "one more byte is another build";
  EXPECT_NE(other.find("LibTorch"), std::string::npos) << other;
}

}  // namespace
}  // namespace ppfsdp::start

int main(int argc, char** argv) {
  if (argc == 2 && std::string(argv[1]) == "--print-build-id") {
    std::fputs(ppfsdp::start::build_id().c_str(), stdout);
    return 0;
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
