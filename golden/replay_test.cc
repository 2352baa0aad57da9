// The replay tool as its user sees it: one line of JSON, the exit codes, one line for each fault.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

namespace ppfsdp::golden {
namespace {

using ::testing::HasSubstr;

struct Result {
  int code;
  std::string out, err;
};

std::string read(const std::filesystem::path& path) {
  std::ifstream in(path);
  return {std::istreambuf_iterator<char>(in), {}};
}

Result replay(const std::string& arguments) {
  const std::filesystem::path directory = ::testing::TempDir();
  const std::string command = "golden/replay " + arguments + " >" + (directory / "out").string() +
                              " 2>" + (directory / "err").string();
  const int status = std::system(command.c_str());
  return {WEXITSTATUS(status), read(directory / "out"), read(directory / "err")};
}

TEST(Replay, PrintsOneLineOfJsonOnEveryBackend) {
  for (const std::string backend : {"sim", "gloo", "single"}) {
    const Result result =
        replay("--case golden/cases/bf16_reduce_fp32_w2.json --backend " + backend);
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_EQ(result.out.find('\n'), result.out.size() - 1) << result.out;
    const auto line = nlohmann::json::parse(result.out);
    EXPECT_EQ(line["case"], "bf16_reduce_fp32_w2");
    EXPECT_EQ(line["backend"], backend);
    EXPECT_EQ(line["world"], 2);
    for (const char* field :
         {"max_loss_rel", "max_grad_norm_rel", "max_grad_abs", "max_param_abs"}) {
      EXPECT_TRUE(line[field].is_number()) << field;
    }
    EXPECT_TRUE(line["bitwise"].is_boolean());
  }
}

TEST(Replay, TimesACaseWithoutARecording) {
  const std::filesystem::path json = std::filesystem::path(::testing::TempDir()) / "timed.json";
  std::ofstream(json) << R"({"case": {"dim": 8, "hidden": 8, "layers": 1, "seq": 4}})";
  const Result result = replay("--case " + json.string() + " --time 5");
  EXPECT_EQ(result.code, 0) << result.err;
  const auto line = nlohmann::json::parse(result.out);
  EXPECT_GE(line["median_ms"].get<double>(), line["min_ms"].get<double>());
  EXPECT_GT(line["min_ms"].get<double>(), 0);
  EXPECT_FALSE(line.contains("bitwise"));
}

TEST(Replay, OtherOrdersOfMoreThanTwoRanksAreWithinToleranceButNotExact) {
  const std::string common = "--case golden/cases/frozen_l1_w5.json --order rank_order";
  const Result result = replay(common);
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_FALSE(nlohmann::json::parse(result.out)["bitwise"]);
  EXPECT_THAT(result.err, HasSubstr("first difference: "));
  EXPECT_EQ(replay(common + " --exact").code, 1);
}

TEST(Replay, ARunThatIsFarFromItsRecordingHasExitCodeOne) {
  // The recording of another learning rate.
  const std::filesystem::path copy = std::filesystem::path(::testing::TempDir()) / "changed.json";
  auto document = nlohmann::json::parse(read("golden/cases/plain_w1.json"));
  document["case"]["lr"] = 0.02;
  std::ofstream(copy) << document.dump();
  std::filesystem::copy_file("golden/cases/plain_w1.safetensors",
                             std::filesystem::path(copy).replace_extension(".safetensors"),
                             std::filesystem::copy_options::overwrite_existing);
  const Result result = replay("--case " + copy.string());
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.err, HasSubstr("changed: first difference: step 1, rank 0: loss"));
  EXPECT_FALSE(nlohmann::json::parse(result.out)["bitwise"]);
}

TEST(ReplayErrors, BadInputHasExitCodeTwoAndOneLine) {
  const std::pair<const char*, const char*> faults[] = {
      {"--case /nowhere/x.json", "/nowhere/x.json: can't open"},
      {"--case golden/cases/plain_w1.json --time 3", "--time 3: must be more than 3"},
      {"--case golden/cases/plain_w1.json --backend gloo --order tree",
       "--order tree: Gloo folds as gloo_ring"}};
  for (const auto& [arguments, message] : faults) {
    const Result result = replay(arguments);
    EXPECT_EQ(result.code, 2) << arguments;
    EXPECT_THAT(result.err, HasSubstr(message));
    EXPECT_EQ(result.err.find('\n'), result.err.size() - 1) << result.err;
    EXPECT_EQ(result.out, "");
  }
  // Of the command line too; and a launcher's world is known before anybody is waited for.
  for (const char* arguments : {"", "--case", "--case x --backend mpi", "--case . ",
                                "--case golden/cases/plain_w1.json --time 99999999999",
                                "--case golden/cases/plain_w1.json --bakend sim"}) {
    const Result result = replay(arguments);
    EXPECT_EQ(result.code, 2) << arguments;
    EXPECT_EQ(result.err.find("ppfsdp: error: "), 0u) << result.err;
    EXPECT_EQ(result.err.find('\n'), result.err.size() - 1) << result.err;
  }
  setenv("RANK", "0", 1);
  setenv("WORLD_SIZE", "3", 1);
  setenv("MASTER_ADDR", "127.0.0.1", 1);
  setenv("MASTER_PORT", "1", 1);
  const Result other = replay("--case golden/cases/plain_w1.json --backend gloo");
  for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) unsetenv(name);
  EXPECT_EQ(other.code, 2);
  EXPECT_EQ(other.err, "ppfsdp: error: the case needs 1 ranks; the launcher's WORLD_SIZE is 3\n");
  EXPECT_EQ(replay("--help").code, 0);
}

// What a full disk or a broken copy leaves.
TEST(ReplayErrors, FilesThatAreEmptyOrCutShortAreNamed) {
  const std::filesystem::path folder = ::testing::TempDir();
  const std::string json = read("golden/cases/plain_w1.json");
  const std::string tensors = read("golden/cases/plain_w1.safetensors");
  const auto replay_of = [&](const std::string& json_text, const std::string& tensor_bytes) {
    std::ofstream(folder / "cut.json", std::ios::binary) << json_text;
    std::ofstream(folder / "cut.safetensors", std::ios::binary) << tensor_bytes;
    const Result result = replay("--case " + (folder / "cut.json").string());
    if (result.code != 0) {
      EXPECT_EQ(result.err.find('\n'), result.err.size() - 1) << result.err;
      EXPECT_EQ(result.out, "");
    }
    return result;
  };
  const auto begins = [&](const char* name, const char* what) {
    return ::testing::StartsWith("ppfsdp: error: " + (folder / name).string() + ": " + what);
  };
  EXPECT_EQ(replay_of(json, tensors).code, 0);
  for (const size_t length : {json.size() - 2, json.size() / 2, size_t{1}}) {
    const Result cut = replay_of(json.substr(0, length), tensors);
    EXPECT_EQ(cut.code, 2) << length;
    EXPECT_THAT(cut.err, begins("cut.json", "not JSON, or cut short: ")) << length;
  }
  for (const size_t length : {tensors.size() - 1, tensors.size() / 2, size_t{100}, size_t{4}}) {
    const Result cut = replay_of(json, tensors.substr(0, length));
    EXPECT_EQ(cut.code, 2) << length;
    EXPECT_THAT(cut.err, begins("cut.safetensors", "")) << length;
  }
  EXPECT_THAT(replay_of("", tensors).err, begins("cut.json", "the file is empty"));
  EXPECT_EQ(replay_of("", tensors).code, 2);
  EXPECT_THAT(replay_of(json, "").err, begins("cut.safetensors", ""));
  EXPECT_EQ(replay_of(json, "").code, 2);
}

}  // namespace
}  // namespace ppfsdp::golden
