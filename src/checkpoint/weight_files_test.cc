#include "src/checkpoint/weight_files.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <string>

namespace ppfsdp::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class WeightFilesTest : public ::testing::Test {
 protected:
  WeightFilesTest()
      : folder_(fs::path(::testing::TempDir()) / ("weights." + std::to_string(getpid()))) {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  ~WeightFilesTest() override { fs::remove_all(folder_); }

  void save(const std::string& file, const std::vector<std::string>& names) const {
    std::vector<std::pair<std::string, at::Tensor>> tensors;
    for (const std::string& name : names) {
      tensors.emplace_back(name, at::full({2}, static_cast<double>(name[0])));
    }
    save_safetensors(folder_ / file, tensors);
  }

  fs::path write(const std::string& file, const std::string& text) const {
    std::ofstream(folder_ / file) << text;
    return folder_ / file;
  }

  static std::string error_of(const fs::path& path) {
    try {
      WeightFiles files(path);
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
    return "no error";
  }

  fs::path folder_;
};

TEST_F(WeightFilesTest, OneFileByItsNameOrItsFolder) {
  save("model.safetensors", {"b", "a"});
  for (const fs::path& path : {folder_, folder_ / "model.safetensors"}) {
    const WeightFiles files(path);
    EXPECT_THAT(files.names(), ElementsAre("a", "b"));
    EXPECT_TRUE(at::equal(files.file("a").tensor("a"), at::full({2}, 97.0)));
    EXPECT_FALSE(files.contains("c"));
    EXPECT_EQ(files.path(), path);
  }
}

TEST_F(WeightFilesTest, AnIndexSaysWhichFileHasWhat) {
  save("one.safetensors", {"a", "unlisted"});
  save("two.safetensors", {"b", "c"});
  // The folder's index comes before its file.
  save("model.safetensors", {"d"});
  const fs::path index = write("model.safetensors.index.json",
                               R"({"metadata": {"total_size": 1}, "weight_map":
              {"a": "one.safetensors", "c": "two.safetensors", "b": "two.safetensors"}})");
  for (const fs::path& path : {folder_, index}) {
    const WeightFiles files(path);
    EXPECT_THAT(files.names(), ElementsAre("a", "b", "c"));
    EXPECT_EQ(files.file("a").path().filename(), "one.safetensors");
    EXPECT_EQ(&files.file("b"), &files.file("c")) << "each file is opened once";
  }
}

TEST_F(WeightFilesTest, FaultsNameTheFile) {
  EXPECT_THAT(error_of(folder_), AllOf(HasSubstr(folder_.string()), HasSubstr("this one neither")));
  EXPECT_THAT(error_of(folder_ / "no.safetensors"), HasSubstr("no.safetensors: can't open"));
  EXPECT_THAT(error_of(folder_ / "no.json"), HasSubstr("no.json: can't read"));
  EXPECT_THAT(error_of(write("bad.json", "{\"weight_map\"")),
              HasSubstr("bad.json: the index is not JSON"));
  EXPECT_THAT(error_of(write("bad.json", R"({"weight_map": {"a": "x", "a": "y"}})")),
              HasSubstr("bad.json: the index names 'a' twice"));
  EXPECT_THAT(error_of(write("bad.json", "[1]")), HasSubstr("has an object \"weight_map\""));
  EXPECT_THAT(error_of(write("bad.json", R"({"weight_map": {"a": 1}})")),
              HasSubstr("the file of tensor 'a' must be a string, is 1"));
  for (const char* file : {"../x.safetensors", "/etc/x", "..", "."}) {
    EXPECT_THAT(
        error_of(write("bad.json", R"({"weight_map": {"a": ")" + std::string(file) + R"("}})")),
        HasSubstr("must be the name of a file beside the index"));
  }
  EXPECT_THAT(error_of(write("bad.json", R"({"weight_map": {"a": "gone.safetensors"}})")),
              HasSubstr("gone.safetensors: can't open"));
  save("one.safetensors", {"b"});
  EXPECT_THAT(error_of(write("bad.json", R"({"weight_map": {"a": "one.safetensors"}})")),
              AllOf(HasSubstr("one.safetensors: there is no tensor 'a'"), HasSubstr("bad.json")));
}

}  // namespace
}  // namespace ppfsdp::checkpoint
