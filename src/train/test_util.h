#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace ppfsdp::train {

/// A test with a folder of its own, removed at its end.
class FolderTest : public testing::Test {
 protected:
  void SetUp() override {
    const testing::TestInfo* info = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = std::filesystem::temp_directory_path() /
              fmt::format("{}.{}.{}", info->test_suite_name(), info->name(), getpid());
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  std::string write(const std::string& name, const std::string& bytes) const {
    std::ofstream(folder_ / name, std::ios::binary) << bytes;
    return path(name);
  }

  /// A file of 5000 bytes of words, the same each time; returns its path.
  std::string write_text() const {
    std::string text;
    for (int i = 0; i < 5000; ++i) text += "a few words of text "[i * i % 20];
    return write("text", text);
  }

  std::filesystem::path folder_;
};

/// The message of the `Error` that `function` throws; empty when it throws none.
template <typename Error, typename Function>
std::string message_of(const Function& function) {
  try {
    function();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace ppfsdp::train
