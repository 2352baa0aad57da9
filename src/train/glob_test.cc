#include "src/train/glob.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace ppfsdp::train {
namespace {

namespace fs = std::filesystem;
using Paths = std::vector<std::string>;

class GlobTest : public testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::temp_directory_path() / fmt::format("glob_test.{}", getpid());
    for (const std::string name :
         {"b.h", "a.h", "a.txt", "Z.h", ".hidden.h", "sub/c.h", "sub/deep/d.h", ".git/e.h"}) {
      fs::create_directories((root_ / name).parent_path());
      std::ofstream(root_ / name) << name;
    }
    fs::create_directories(root_ / "folder.h");
    fs::create_directory_symlink(root_, root_ / "sub/loop");
  }
  void TearDown() override { fs::remove_all(root_); }

  /// Matches of root/pattern, without the root.
  Paths expand(const std::string& pattern) const {
    Paths found = expand_glob((root_ / pattern).string());
    for (std::string& path : found) path = path.substr(root_.string().size() + 1);
    return found;
  }

  fs::path root_;
};

// The order decides which tokens a seed trains on: it must be bytewise, not the folder's or a
// locale's (which would put Z after b). Folders and hidden files must stay out.
TEST_F(GlobTest, star_matches_files_in_bytewise_order) {
  EXPECT_EQ(expand("*.h"), (Paths{"Z.h", "a.h", "b.h"}));
}

TEST_F(GlobTest, double_star_is_any_depth_and_ignores_link_loops) {
  EXPECT_EQ(expand("**/*.h"), (Paths{"Z.h", "a.h", "b.h", "sub/c.h", "sub/deep/d.h"}));
  EXPECT_EQ(expand("sub/**"), (Paths{"sub/c.h", "sub/deep/d.h"}));
  EXPECT_EQ(expand("**/deep/**/*.h"), (Paths{"sub/deep/d.h"}));
  EXPECT_EQ(expand("**/**/c.h"), (Paths{"sub/c.h"})) << "found by two ways, listed once";
}

TEST_F(GlobTest, sets_question_marks_and_explicit_dots) {
  EXPECT_EQ(expand("[ab].h"), (Paths{"a.h", "b.h"}));
  EXPECT_EQ(expand("?.txt"), (Paths{"a.txt"}));
  EXPECT_EQ(expand(".*.h"), (Paths{".hidden.h"}));
  EXPECT_EQ(expand("s*/c.h"), (Paths{"sub/c.h"}));
}

TEST_F(GlobTest, no_match_is_empty_and_a_plain_path_stands_for_itself) {
  EXPECT_EQ(expand("*.cc"), Paths{});
  EXPECT_EQ(expand("nowhere/*.h"), Paths{});
  EXPECT_EQ(expand("nowhere.h"), Paths{"nowhere.h"});
  std::ofstream(root_ / "x[1].h") << "x";
  EXPECT_EQ(expand("x[1].h"), Paths{"x[1].h"}) << "a file's own name wins over the pattern";
}

TEST_F(GlobTest, relative_patterns_give_relative_paths) {
  const fs::path before = fs::current_path();
  fs::current_path(root_);
  const Paths found = expand_glob("sub/*.h");
  const Paths below = expand_glob("**/d.h");
  fs::current_path(before);
  EXPECT_EQ(found, Paths{"sub/c.h"});
  EXPECT_EQ(below, Paths{"sub/deep/d.h"});
}

}  // namespace
}  // namespace ppfsdp::train
