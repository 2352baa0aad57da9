#include "src/train/output_file.h"

#include <iterator>

#include "src/train/config_error.h"
#include "src/train/test_util.h"

namespace ppfsdp::train {
namespace {

class OutputFileTest : public FolderTest {
 protected:
  std::string content(const std::string& name) const {
    std::ifstream file(folder_ / name, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
};

// A record must be in the file as soon as append returns: that is what a crash leaves.
TEST_F(OutputFileTest, records_are_there_at_once_and_folders_are_made) {
  OutputFile file("key", path("a/b/c"), IfExists::kError);
  file.append("one\n");
  EXPECT_EQ(content("a/b/c"), "one\n");
  file.append("two\n");
  EXPECT_EQ(content("a/b/c"), "one\ntwo\n");
}

TEST_F(OutputFileTest, existing_file) {
  write("a", "old");
  EXPECT_EQ(
      message_of<ConfigError>([&] { OutputFile("metrics.jsonl", path("a"), IfExists::kError); }),
      "metrics.jsonl: " + path("a") +
          " exists; remove it, or set metrics.if_exists to \"append\" or \"overwrite\"");
  EXPECT_EQ(content("a"), "old") << "the refusal must not harm the file";
  OutputFile("key", path("a"), IfExists::kAppend).append("new");
  EXPECT_EQ(content("a"), "oldnew");
  OutputFile("key", path("a"), IfExists::kOverwrite).append("new");
  EXPECT_EQ(content("a"), "new");
}

TEST_F(OutputFileTest, paths_that_can_not_be_written) {
  write("file", "x");
  EXPECT_EQ(message_of<ConfigError>([&] { OutputFile("key", path("file/x"), IfExists::kError); }),
            "key: cannot make the folder " + path("file") + ": Not a directory");
  EXPECT_EQ(
      message_of<ConfigError>([&] { OutputFile("key", folder_.string(), IfExists::kAppend); }),
      "key: " + folder_.string() + " is a folder; name a file");
}

// A run that fails before its first step must not leave a file that the next one trips over; one
// that was there stays.
TEST_F(OutputFileTest, made_for_nothing_is_removed) {
  OutputFile("key", path("a"), IfExists::kError);
  EXPECT_FALSE(std::filesystem::exists(path("a")));
  write("b", "");
  OutputFile("key", path("b"), IfExists::kAppend);
  EXPECT_TRUE(std::filesystem::exists(path("b")));
  {
    OutputFile first("key", path("c"), IfExists::kError);
    OutputFile second(std::move(first));
    second.append("x");
  }
  EXPECT_EQ(content("c"), "x");
}

// /dev/full fails every write, as a full disk does.
TEST_F(OutputFileTest, full_disk_is_an_error) {
  OutputFile file("key", "/dev/full", IfExists::kAppend);
  EXPECT_EQ(message_of<std::runtime_error>([&] { file.append("x"); }),
            "key: cannot write /dev/full: No space left on device");
}

TEST_F(OutputFileTest, unknown_policy) { EXPECT_THROW(parse_if_exists("erorr"), ConfigError); }

}  // namespace
}  // namespace ppfsdp::train
