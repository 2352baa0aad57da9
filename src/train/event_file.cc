#include "src/train/event_file.h"

#include <array>
#include <bit>
#include <cstring>

namespace ppfsdp::train {
namespace {

constexpr std::array<uint32_t, 256> make_crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    // 0x82f63b78 is the polynomial with its bits reversed.
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78u : 0u);
    table[byte] = crc;
  }
  return table;
}

constexpr std::array<uint32_t, 256> kCrcTable = make_crc_table();

uint32_t masked_crc32c(std::string_view bytes) {
  return std::rotr(crc32c(bytes), 15) + 0xa282ead8u;
}

template <typename Value>
std::string little_endian(Value value) {
  static_assert(std::endian::native == std::endian::little);
  std::string bytes(sizeof(value), '\0');
  std::memcpy(bytes.data(), &value, sizeof(value));
  return bytes;
}

// Protobuf wire types.
constexpr uint64_t kVarint = 0;
constexpr uint64_t kFixed64 = 1;
constexpr uint64_t kLengthDelimited = 2;
constexpr uint64_t kFixed32 = 5;

std::string varint(uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes += static_cast<char>(value | 0x80);
  return bytes + static_cast<char>(value);
}

std::string tag(uint64_t field, uint64_t wire_type) { return varint(field << 3 | wire_type); }

std::string length_delimited(uint64_t field, std::string_view bytes) {
  return tag(field, kLengthDelimited) + varint(bytes.size()) + std::string(bytes);
}

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  uint32_t crc = ~0u;
  for (const char byte : bytes) {
    crc = (crc >> 8) ^ kCrcTable[(crc ^ static_cast<unsigned char>(byte)) & 0xff];
  }
  return ~crc;
}

std::string tf_record(std::string_view bytes) {
  const std::string length = little_endian<uint64_t>(bytes.size());
  return length + little_endian(masked_crc32c(length)) + std::string(bytes) +
         little_endian(masked_crc32c(bytes));
}

std::string version_event(double wall_time) {
  return tag(1, kFixed64) + little_endian(wall_time) + length_delimited(3, "brain.Event:2");
}

std::string scalar_event(double wall_time, int64_t step,
                         const std::vector<std::pair<std::string, float>>& scalars) {
  std::string summary;
  for (const auto& [name, value] : scalars) {
    summary +=
        length_delimited(1, length_delimited(1, name) + tag(2, kFixed32) + little_endian(value));
  }
  return tag(1, kFixed64) + little_endian(wall_time) + tag(2, kVarint) +
         varint(static_cast<uint64_t>(step)) + length_delimited(5, summary);
}

}  // namespace ppfsdp::train
