// The update tool: what it records, replay repeats; what is wrong is one line and harms nothing.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace ppfsdp::golden {
namespace {

namespace fs = std::filesystem;

std::string read(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

class UpdateTest : public ::testing::Test {
 protected:
  void SetUp() override {
    fs::remove_all(workspace_);
    fs::create_directories(cases_);
  }
  void write(const std::string& name, const std::string& text) const {
    std::ofstream(cases_ / name) << text;
  }
  std::string output() const { return read(workspace_ / "out"); }
  int run(const std::string& command) const {
    const int status =
        std::system((command + " >" + (workspace_ / "out").string() + " 2>&1").c_str());
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  int update(const std::string& arguments = "") const {
    return run("BUILD_WORKSPACE_DIRECTORY=" + workspace_.string() + " golden/update " + arguments);
  }

  const fs::path workspace_ = fs::path(::testing::TempDir()) / "workspace";
  const fs::path cases_ = workspace_ / "golden/cases";
};

constexpr const char* kTiny =
    R"({"case": {"world": 2, "steps": 2, "dim": 8, "hidden": 8, "layers": 1, "seq": 4}})";

TEST_F(UpdateTest, RecordsWhatReplayRepeatsAndTheSameEachTime) {
  write("tiny.json", kTiny);
  ASSERT_EQ(update(), 0) << output();
  EXPECT_EQ(output(), (cases_ / "tiny.json").string() + "\n");
  const std::string json = read(cases_ / "tiny.json");
  const std::string tensors = read(cases_ / "tiny.safetensors");
  EXPECT_EQ(run("golden/replay --exact --case " + (cases_ / "tiny.json").string()), 0) << output();
  ASSERT_EQ(update(), 0) << output();
  EXPECT_EQ(read(cases_ / "tiny.json"), json);
  EXPECT_TRUE(read(cases_ / "tiny.safetensors") == tensors);
}

TEST_F(UpdateTest, MisuseIsOneLineAndCodeTwo) {
  write("tiny.json", kTiny);
  EXPECT_EQ(update("tiny"), 2);
  EXPECT_EQ(output(),
            "update: error: takes no arguments, got 'tiny'; it rewrites every case of "
            "golden/cases\n");
  EXPECT_EQ(run("env -u BUILD_WORKSPACE_DIRECTORY golden/update"), 2);
  EXPECT_EQ(output(), "update: error: run this as `bazel run //golden:update`\n");
  EXPECT_EQ(run("BUILD_WORKSPACE_DIRECTORY=/no/where golden/update"), 2);
  EXPECT_EQ(output(), "update: error: /no/where/golden/cases: there is no such folder\n");
  fs::remove(cases_ / "tiny.json");
  EXPECT_EQ(update(), 2);
  EXPECT_EQ(output(), "update: error: " + cases_.string() + ": holds no NAME.json\n");
}

// The good case comes before the bad one, and must not have been touched.
TEST_F(UpdateTest, ABadCaseLeavesTheOthersAlone) {
  write("a.json", kTiny);
  write("b.json", R"({"case": {"dmi": 8}})");
  EXPECT_EQ(update(), 2);
  EXPECT_EQ(output(), "update: error: " + (cases_ / "b.json").string() +
                          ": case.dmi is no field of a case\n");
  EXPECT_EQ(read(cases_ / "a.json"), kTiny);
  EXPECT_FALSE(fs::exists(cases_ / "a.safetensors"));
  write("b.json", "");
  EXPECT_EQ(update(), 2);
  EXPECT_EQ(output(), "update: error: " + (cases_ / "b.json").string() + ": the file is empty\n");
}

}  // namespace
}  // namespace ppfsdp::golden
