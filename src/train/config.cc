#include "src/train/config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <toml++/toml.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>

#include "src/train/config_error.h"
#include "src/train/config_keys.h"

namespace ppfsdp::train {
namespace {

[[noreturn]] void fail(const std::string& where, const std::string& what) {
  throw ConfigError(where + ": " + what);
}

/// What a TOML value is, for "got ...".
std::string got(const toml::node& node) {
  if (const auto* value = node.as_string()) return fmt::format("the string \"{}\"", value->get());
  if (const auto* value = node.as_integer()) return fmt::format("the integer {}", value->get());
  if (const auto* value = node.as_floating_point()) {
    return fmt::format("the number {}", float_as_toml(value->get()));
  }
  if (const auto* value = node.as_boolean()) return value->get() ? "true" : "false";
  if (node.is_array()) return "a list";
  if (node.is_table()) return "a table";
  return "a date or time";
}

/// Writes one value into a field, or fails with what would be right.
class Assign {
 public:
  Assign(const std::string& where, const Key& key, const toml::node& node)
      : where_(where), key_(key), node_(node) {}

  void operator()(int64_t* field) const { *field = integer(); }
  void operator()(std::optional<int64_t>* field) const { *field = integer(); }
  void operator()(double* field) const { *field = number(); }
  void operator()(std::optional<double>* field) const { *field = number(); }
  void operator()(bool* field) const { *field = boolean(); }
  void operator()(std::optional<bool>* field) const { *field = boolean(); }

  void operator()(std::string* field) const {
    const auto* value = node_.as_string();
    if (value == nullptr) refuse();
    const std::string& text = value->get();
    if (!key_.choices.empty() &&
        std::find(key_.choices.begin(), key_.choices.end(), text) == key_.choices.end()) {
      const std::string_view near = nearest(text, key_.choices);
      refuse(near.empty() ? "" : fmt::format("; did you mean \"{}\"?", near));
    }
    *field = text;
  }

  void operator()(std::vector<std::string>* field) const {
    if (const auto* value = node_.as_string()) {
      *field = {value->get()};
      return;
    }
    const toml::array* list = node_.as_array();
    if (list == nullptr) refuse();
    field->clear();
    for (const toml::node& item : *list) {
      const auto* value = item.as_string();
      if (value == nullptr) refuse(fmt::format(" with {} in it", got(item)));
      field->push_back(value->get());
    }
  }

  void operator()(ReshardSetting* field) const {
    if (const auto* flag = node_.as_boolean()) {
      *field = flag->get();
    } else if (const auto* ranks = node_.as_integer();
               ranks != nullptr && ranks->get() >= 1 && ranks->get() <= 1 << 30) {
      *field = static_cast<int>(ranks->get());
    } else if (const auto* text = node_.as_string(); text != nullptr && text->get() == "auto") {
      *field = std::monostate{};
    } else {
      refuse();
    }
  }

 private:
  [[noreturn]] void refuse(const std::string& more = "") const {
    fail(where_,
         fmt::format("{} must be {}, got {}{}", key_.name, expected_type(key_), got(node_), more));
  }

  int64_t integer() const {
    const auto* value = node_.as_integer();
    if (value == nullptr) refuse();
    check_range(static_cast<double>(value->get()));
    return value->get();
  }

  double number() const {
    double value = 0;
    if (const auto* whole = node_.as_integer()) {
      value = static_cast<double>(whole->get());
    } else if (const auto* real = node_.as_floating_point()) {
      value = real->get();
    } else {
      refuse();
    }
    check_range(value);
    return value;
  }

  bool boolean() const {
    const auto* value = node_.as_boolean();
    if (value == nullptr) refuse();
    return value->get();
  }

  // Written so that NaN is out of every range.
  void check_range(double value) const {
    // Where the range is too wide to be part of every message.
    if (value > key_.max && std::isfinite(value) &&
        expected_type(key_).find(" to ") == std::string::npos) {
      refuse(fmt::format("; at most {}", key_.max));
    }
    if (!(value >= key_.min && value <= key_.max)) refuse();
  }

  const std::string& where_;
  const Key& key_;
  const toml::node& node_;
};

std::vector<std::string_view> section_names() {
  std::vector<std::string_view> names;
  for (const Key& key : config_keys()) {
    if (names.empty() || names.back() != key.section()) names.push_back(key.section());
  }
  return names;
}

bool is_section(std::string_view name) {
  const std::vector<std::string_view> names = section_names();
  return std::find(names.begin(), names.end(), name) != names.end();
}

std::string listed(const std::vector<std::string_view>& names) {
  return fmt::format("{}", fmt::join(names, ", "));
}

const Key& find_key(const std::string& where, std::string_view section, std::string_view name) {
  std::vector<std::string_view> in_section;
  std::vector<std::string_view> sections = section_names();
  std::string elsewhere;
  for (const Key& key : config_keys()) {
    if (key.section() == section) {
      if (key.key() == name) return key;
      in_section.push_back(key.key());
    } else if (key.key() == name) {
      elsewhere = key.name;
    }
  }
  if (in_section.empty()) {
    const std::string_view near = nearest(section, sections);
    fail(where, fmt::format("there is no section [{}]; {}", section,
                            !elsewhere.empty() ? fmt::format("did you mean {}?", elsewhere)
                            : near.empty()     ? "the sections are " + listed(sections)
                                               : fmt::format("did you mean [{}]?", near)));
  }
  std::string hint;
  if (const std::string_view near = nearest(name, in_section); !near.empty()) {
    hint = fmt::format("did you mean {}.{}?", section, near);
  } else if (!elsewhere.empty()) {
    hint = fmt::format("did you mean {}?", elsewhere);
  } else {
    hint = fmt::format("the keys of [{}] are {}", section, listed(in_section));
  }
  fail(where, fmt::format("there is no key {}.{}; {}", section, name, hint));
}

void assign(const std::string& where, const Key& key, const toml::node& node,
            LoadedConfig& loaded) {
  std::visit(Assign(where, key, node), key.field(loaded.config));
  loaded.given.insert(std::string(key.name));
}

void apply_file(std::string_view text, const std::string& source, LoadedConfig& loaded) {
  toml::table table;
  try {
    table = toml::parse(text, source);
  } catch (const toml::parse_error& error) {
    // The parser's descriptions can run over lines; the first says what is wrong.
    const std::string_view description = error.description();
    fail(fmt::format("{}:{}", source, error.source().begin.line),
         std::string(description.substr(0, description.find('\n'))));
  }
  const auto line_of = [&](const toml::node& node) {
    return fmt::format("{}:{}", source, node.source().begin.line);
  };
  for (const auto& [section, node] : table) {
    const toml::table* entries = node.as_table();
    if (entries == nullptr && is_section(section.str())) {
      fail(line_of(node),
           fmt::format("[{}] must be one section of keys, got {}", section.str(), got(node)));
    }
    if (entries == nullptr) {
      // A key without a section, or a section's name used as a key.
      std::string hint = "write it under its section";
      for (const Key& key : config_keys()) {
        if (key.key() == section.str()) hint = fmt::format("write it under [{}]", key.section());
      }
      fail(line_of(node),
           fmt::format("the key {} stands outside any section; {}", section.str(), hint));
    }
    // An empty table still has a name to check.
    if (entries->empty() && !is_section(section.str())) find_key(line_of(node), section.str(), "");
    for (const auto& [name, value] : *entries) {
      const std::string where = line_of(value);
      assign(where, find_key(where, section.str(), name.str()), value, loaded);
    }
  }
}

/// A value as --set takes it: TOML, or for keys that take strings the bare text.
toml::table parse_override_value(const std::string& where, const Key& key,
                                 const std::string& text) {
  Config config;
  const Field field = key.field(config);
  const bool takes_string = std::holds_alternative<std::string*>(field) ||
                            std::holds_alternative<std::vector<std::string>*>(field) ||
                            std::holds_alternative<ReshardSetting*>(field);
  const char first = text.empty() ? '\0' : text.front();
  const bool bare = std::holds_alternative<std::string*>(field)
                        ? first != '"' && first != '\''
                        : std::holds_alternative<std::vector<std::string>*>(field) &&
                              first != '"' && first != '\'' && first != '[';
  if (!bare && text.find('\n') == std::string::npos) {
    try {
      return toml::parse("value = " + text);
    } catch (const toml::parse_error&) {
      if (!takes_string || first == '"' || first == '\'' || first == '[') {
        fail(where, fmt::format("{} must be {}, got '{}'", key.name, expected_type(key), text));
      }
    }
  }
  toml::table table;
  table.insert("value", text);
  return table;
}

void apply_override(const std::string& text, std::set<std::string>& overridden,
                    LoadedConfig& loaded) {
  const std::string where = "--set " + text;
  const size_t equals = text.find('=');
  const std::string name = text.substr(0, equals);
  const size_t dot = name.find('.');
  if (equals == std::string::npos || dot == std::string::npos || dot == 0 ||
      dot + 1 == name.size()) {
    fail(where, "an override is section.key=value, as in --set training.steps=10");
  }
  const Key& key = find_key(where, name.substr(0, dot), name.substr(dot + 1));
  if (!overridden.insert(name).second) fail(where, name + " is set twice");
  const toml::table table = parse_override_value(where, key, text.substr(equals + 1));
  assign(where, key, *table.get("value"), loaded);
}

constexpr size_t kLargestFile = 1 << 20;

std::string read_file(const std::string& path) {
  struct stat status {};
  if (stat(path.c_str(), &status) != 0) fail(path, std::strerror(errno));
  if (S_ISDIR(status.st_mode)) fail(path, "is a folder; a config is a TOML file");
  std::ifstream file(path, std::ios::binary);
  std::string text;
  char part[1 << 16];
  while (file.read(part, sizeof(part)) || file.gcount() > 0) {
    text.append(part, static_cast<size_t>(file.gcount()));
    // A device gives bytes for ever.
    if (text.size() > kLargestFile) fail(path, "is larger than 1 MiB, which is no config");
  }
  if (file.bad() || !file.eof()) {
    fail(path, fmt::format("cannot be read: {}", std::strerror(errno)));
  }
  return text;
}

}  // namespace

LoadedConfig parse_config(std::string_view toml, const std::string& source,
                          const std::vector<std::string>& overrides) {
  LoadedConfig loaded;
  apply_file(toml, source, loaded);
  std::set<std::string> overridden;
  for (const std::string& text : overrides) apply_override(text, overridden, loaded);
  return loaded;
}

LoadedConfig load_config(const std::string& path, const std::vector<std::string>& overrides) {
  return parse_config(path.empty() ? std::string() : read_file(path), path, overrides);
}

}  // namespace ppfsdp::train
