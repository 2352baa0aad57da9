#include "src/train/token_data.h"

#include "src/train/config_error.h"
#include "src/train/test_util.h"

namespace ppfsdp::train {
namespace {

using Tokens = std::vector<int64_t>;

class TokenDataTest : public FolderTest {
 protected:
  static Tokens read(const TokenData& data, int64_t first, int64_t count,
                     int64_t vocab = int64_t{1} << 32) {
    Tokens out(static_cast<size_t>(count));
    data.read(first, count, vocab, out.data());
    return out;
  }

  static std::string open_error(const std::vector<std::string>& patterns, TokenType type) {
    return message_of<ConfigError>([&] { TokenData(patterns, type); });
  }
};

TEST_F(TokenDataTest, text_is_bytes_joined_in_path_order) {
  write("b.txt", "B\xff");
  write("a.txt", "AA");
  write("c.txt", "");
  const TokenData data({path("b.txt"), path("*.txt")}, TokenType::kByte);
  EXPECT_EQ(data.size(), 4);
  EXPECT_EQ(data.paths(), (std::vector<std::string>{path("a.txt"), path("b.txt")}));
  EXPECT_EQ(read(data, 0, 4), (Tokens{'A', 'A', 'B', 0xff}));
}

// Ids are unsigned and little-endian; a read may run over any number of files.
TEST_F(TokenDataTest, ids_across_files) {
  write("a.bin", std::string("\x01\x00\xff\xff", 4));
  write("b.bin", std::string("\x02\x01", 2));
  write("c.bin", std::string("\x00\x80\x04\x00", 4));
  const TokenData data({path("*.bin")}, TokenType::kUint16);
  const Tokens all{1, 65535, 258, 32768, 4};
  for (int64_t first = 0; first < 5; ++first) {
    for (int64_t count = 0; count <= 5 - first; ++count) {
      EXPECT_EQ(read(data, first, count), Tokens(all.begin() + first, all.begin() + first + count));
    }
  }
  write("wide", std::string("\x01\x02\x03\xff", 4));
  EXPECT_EQ(read(TokenData({path("wide")}, TokenType::kUint32), 0, 1), Tokens{0xff030201});
}

TEST_F(TokenDataTest, id_beyond_the_vocabulary_names_file_and_position) {
  write("a.bin", std::string("\x01\x00", 2));
  write("b.bin", std::string("\x02\x00\x00\x01", 4));
  const TokenData data({path("*.bin")}, TokenType::kUint16);
  EXPECT_EQ(read(data, 0, 3, 257), (Tokens{1, 2, 256}));
  EXPECT_EQ(message_of<ConfigError>([&] { read(data, 0, 3, 256); }),
            "data.files: " + path("b.bin") +
                ": token 256 at index 1 (byte 2) is not below the vocabulary of 256 (model.vocab)");
}

TEST_F(TokenDataTest, files_that_do_not_serve) {
  EXPECT_EQ(open_error({path("no.txt")}, TokenType::kByte),
            "data.files: " + path("no.txt") + ": No such file or directory");
  EXPECT_EQ(open_error({path("*.txt")}, TokenType::kByte),
            "data.files: " + path("*.txt") + ": no file matches");
  EXPECT_EQ(open_error({folder_.string()}, TokenType::kByte),
            "data.files: " + folder_.string() + ": is a folder; to take the files in it write " +
                folder_.string() + "/*");
  EXPECT_EQ(open_error({"/dev/null"}, TokenType::kByte),
            "data.files: /dev/null: is not a regular file");
  const std::string empty = write("empty", "");
  EXPECT_EQ(open_error({empty}, TokenType::kByte), "data.files: " + empty + ": is empty");
  EXPECT_EQ(open_error({empty}, TokenType::kUint16), "data.files: " + empty + ": is empty");
  const std::string odd = write("odd.bin", "abc");
  EXPECT_EQ(open_error({odd}, TokenType::kUint16),
            "data.files: " + odd +
                ": has 3 bytes, which is not a whole number of 2-byte tokens (data.dtype = "
                "\"uint16\")");
  EXPECT_NE(open_error({odd}, TokenType::kUint32), "");
}

// The default text must be found wherever the binary runs, and be enough for many batches.
TEST_F(TokenDataTest, libtorch_headers_are_there) {
  const TokenData data({libtorch_headers_glob()}, TokenType::kByte);
  EXPECT_GT(data.paths().size(), 500u);
  EXPECT_GT(data.size(), 1 << 20);
}

}  // namespace
}  // namespace ppfsdp::train
