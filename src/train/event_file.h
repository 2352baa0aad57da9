#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace ppfsdp::train {

/// CRC-32C (Castagnoli: reflected, polynomial 0x1edc6f41, initial and final complement), RFC 3720.
uint32_t crc32c(std::string_view bytes);

/// One TFRecord: length (uint64, little-endian), its masked CRC, the bytes, their masked CRC. The
/// mask of c is (c rotated right by 15) + 0xa282ead8.
std::string tf_record(std::string_view bytes);

/// TensorBoard's Event message for the start of a file, and for scalars of one step.
///
/// Encoded by hand, since three messages with eight fields are all that is needed and LibTorch
/// exports symbols of its own, older google::protobuf, which a second one in the process would
/// clash with:
///   Event { double wall_time = 1; int64 step = 2; string file_version = 3; Summary summary = 5; }
///   Summary { repeated Value value = 1; }   Value { string tag = 1; float simple_value = 2; }
std::string version_event(double wall_time);
std::string scalar_event(double wall_time, int64_t step,
                         const std::vector<std::pair<std::string, float>>& scalars);

}  // namespace ppfsdp::train
