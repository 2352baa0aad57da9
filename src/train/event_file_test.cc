#include "src/train/event_file.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>

namespace ppfsdp::train {
namespace {

// RFC 3720, B.4, and the check value of the CRC catalogue.
TEST(EventFileTest, crc_of_published_vectors) {
  EXPECT_EQ(crc32c(""), 0u);
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
  std::string ascending;
  for (int i = 0; i < 32; ++i) ascending += static_cast<char>(i);
  EXPECT_EQ(crc32c(ascending), 0x46dd794eu);
}

uint64_t little_endian(std::string_view bytes) {
  uint64_t value = 0;
  for (size_t i = bytes.size(); i-- > 0;) {
    value = value << 8 | static_cast<unsigned char>(bytes[i]);
  }
  return value;
}

// The CRC by the definition, bit by bit, as a division of polynomials: shares nothing with the
// table.
uint32_t reference_masked_crc(std::string_view bytes) {
  uint32_t remainder = 0xffffffff;
  for (unsigned char byte : bytes) {
    for (int bit = 0; bit < 8; ++bit) {
      const bool in = (byte >> bit & 1) != 0;
      const bool out = (remainder >> 31) != 0;
      remainder = (remainder << 1) ^ (in != out ? 0x1edc6f41u : 0u);
    }
  }
  uint32_t crc = 0;
  for (int bit = 0; bit < 32; ++bit) crc |= (remainder >> bit & 1) << (31 - bit);
  crc = ~crc;
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
}

TEST(EventFileTest, record_is_framed_with_masked_crcs) {
  const std::string record = tf_record("hello");
  ASSERT_EQ(record.size(), 8u + 4 + 5 + 4);
  EXPECT_EQ(little_endian(record.substr(0, 8)), 5u);
  EXPECT_EQ(little_endian(record.substr(8, 4)), reference_masked_crc(record.substr(0, 8)));
  EXPECT_EQ(record.substr(12, 5), "hello");
  EXPECT_EQ(little_endian(record.substr(17, 4)), reference_masked_crc("hello"));
}

/// Any protobuf message: field number -> its values; numbers as raw bits.
struct Message {
  std::map<uint64_t, std::vector<uint64_t>> numbers;
  std::map<uint64_t, std::vector<std::string>> strings;

  explicit Message(std::string_view bytes) {
    size_t at = 0;
    const auto varint = [&] {
      uint64_t value = 0;
      for (int shift = 0;; shift += 7) {
        const uint64_t byte = static_cast<unsigned char>(bytes.at(at++));
        value |= (byte & 0x7f) << shift;
        if (byte < 0x80) return value;
      }
    };
    while (at < bytes.size()) {
      const uint64_t key = varint();
      switch (key & 7) {
        case 0:
          numbers[key >> 3].push_back(varint());
          break;
        case 1:
          numbers[key >> 3].push_back(little_endian(bytes.substr(at, 8)));
          at += 8;
          break;
        case 2: {
          const uint64_t length = varint();
          strings[key >> 3].emplace_back(bytes.substr(at, length));
          at += length;
          break;
        }
        case 5:
          numbers[key >> 3].push_back(little_endian(bytes.substr(at, 4)));
          at += 4;
          break;
        default:
          throw std::runtime_error("unknown wire type");
      }
    }
    if (at != bytes.size()) throw std::runtime_error("cut short");
  }
};

double as_double(uint64_t bits) {
  double value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

float as_float(uint64_t bits) {
  const uint32_t low = static_cast<uint32_t>(bits);
  float value = 0;
  std::memcpy(&value, &low, sizeof(value));
  return value;
}

TEST(EventFileTest, events_decode_to_what_was_encoded) {
  const Message version(version_event(12.5));
  EXPECT_EQ(as_double(version.numbers.at(1).at(0)), 12.5);
  EXPECT_EQ(version.strings.at(3).at(0), "brain.Event:2");

  // A long tag and a large step need more than one byte of varint.
  const std::string long_tag(200, 'x');
  const int64_t step = 300'000'000'000;
  const Message event(scalar_event(0.25, step, {{"loss", 1.5f}, {long_tag, -0.0f}}));
  EXPECT_EQ(as_double(event.numbers.at(1).at(0)), 0.25);
  EXPECT_EQ(event.numbers.at(2).at(0), static_cast<uint64_t>(step));
  const Message summary(event.strings.at(5).at(0));
  ASSERT_EQ(summary.strings.at(1).size(), 2u);
  const Message loss(summary.strings.at(1)[0]), other(summary.strings.at(1)[1]);
  EXPECT_EQ(loss.strings.at(1).at(0), "loss");
  EXPECT_EQ(as_float(loss.numbers.at(2).at(0)), 1.5f);
  EXPECT_EQ(other.strings.at(1).at(0), long_tag);
  EXPECT_EQ(other.numbers.at(2).at(0), 0x80000000u);
}

}  // namespace
}  // namespace ppfsdp::train
