#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace ppfsdp::checkpoint {

/// Parses all of `text`, of which `place` ("a.safetensors: the header") begins what is said, and
/// which stands at `offset` of its file. Stricter than JSON: a name that comes twice in an object,
/// of which one would be lost, more than 16 levels and strings with U+0000 are errors too. Throws
/// c10::Error, whose text stays short whatever is in the file.
nlohmann::json parse_strictly(std::string_view text, const std::string& place, uint64_t offset);

/// `value` for a message, cut where it is long.
std::string shown(const nlohmann::json& value);

}  // namespace ppfsdp::checkpoint
