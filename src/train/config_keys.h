#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "src/train/config.h"

namespace ppfsdp::train {

/// Where a key's value lives in a Config; the alternative is the key's type.
using Field = std::variant<int64_t*, double*, bool*, std::string*, std::vector<std::string>*,
                           std::optional<int64_t>*, std::optional<double>*, std::optional<bool>*,
                           ReshardSetting*>;

/// One config key: all that parsing, --set, --help and error messages know about it.
struct Key {
  std::string_view name;  ///< "section.key"
  Field (*field)(Config& config);
  std::string_view unit;  ///< empty for a number without one
  std::string_view help;
  /// Inclusive bounds of a number.
  double min = 0;
  double max = 0;
  /// What a string may be; empty: anything.
  std::vector<std::string_view> choices;
  /// Printed as the default where the value itself says little ("" or unset).
  std::string_view default_text;

  std::string_view section() const { return name.substr(0, name.find('.')); }
  std::string_view key() const { return name.substr(name.find('.') + 1); }
};

/// All keys, grouped by section.
const std::vector<Key>& config_keys();

/// What the key takes: "an integer", "true or false", "\"adamw\" or \"sgd\"", ...
std::string expected_type(const Key& key);

/// The field's value as TOML; empty for an optional that is unset.
std::string value_as_toml(const Field& field);

/// A float as TOML writes it ("1.0", "1e-08", "inf").
std::string float_as_toml(double value);

/// The candidate with the smallest edit distance (insert, delete, replace, swap of neighbours) to
/// `word`, if it is near enough to be what was meant; empty otherwise.
std::string_view nearest(std::string_view word, const std::vector<std::string_view>& candidates);

}  // namespace ppfsdp::train
