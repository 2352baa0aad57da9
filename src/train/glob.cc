#include "src/train/glob.h"

#include <fnmatch.h>

#include <algorithm>
#include <filesystem>
#include <sstream>
#include <system_error>

namespace ppfsdp::train {
namespace {

namespace fs = std::filesystem;

bool has_wildcard(const std::string& text) {
  return text.find_first_of("*?[") != std::string::npos;
}

bool matches(const std::string& name, const std::string& component) {
  return fnmatch(component.c_str(), name.c_str(), FNM_PERIOD) == 0;
}

class Walk {
 public:
  explicit Walk(std::vector<std::string> components) : components_(std::move(components)) {}

  /// Adds what components_[index...] match below `folder` (empty: the working directory).
  void visit(const fs::path& folder, size_t index) {
    const std::string& component = components_[index];
    const bool last = index + 1 == components_.size();
    if (component == "**") {
      visit(folder, index + 1);
      for_each_entry(folder, [&](const fs::directory_entry& entry) {
        std::error_code ignored;
        if (!entry.is_symlink(ignored) && entry.is_directory(ignored) &&
            matches(entry.path().filename(), "*")) {
          visit(folder / entry.path().filename(), index);
        }
      });
    } else if (!has_wildcard(component)) {
      step_into(folder / component, index, last);
    } else {
      for_each_entry(folder, [&](const fs::directory_entry& entry) {
        const std::string name = entry.path().filename();
        if (matches(name, component)) step_into(folder / name, index, last);
      });
    }
  }

  std::vector<std::string> take() {
    std::sort(found_.begin(), found_.end());
    // "**/**" reaches a file by more than one way.
    found_.erase(std::unique(found_.begin(), found_.end()), found_.end());
    return std::move(found_);
  }

 private:
  void step_into(const fs::path& path, size_t index, bool last) {
    std::error_code ignored;
    const fs::file_status status = fs::status(path, ignored);
    if (last) {
      if (fs::exists(status) && !fs::is_directory(status)) found_.push_back(path.string());
    } else if (fs::is_directory(status)) {
      visit(path, index + 1);
    }
  }

  template <typename Function>
  void for_each_entry(const fs::path& folder, const Function& function) {
    std::error_code error;
    fs::directory_iterator entries(folder.empty() ? fs::path(".") : folder, error);
    for (; !error && entries != fs::directory_iterator(); entries.increment(error)) {
      function(*entries);
    }
  }

  std::vector<std::string> components_;
  std::vector<std::string> found_;
};

}  // namespace

std::vector<std::string> expand_glob(const std::string& pattern) {
  std::error_code ignored;
  if (!has_wildcard(pattern) || fs::exists(pattern, ignored)) return {pattern};
  std::vector<std::string> components;
  std::istringstream parts(pattern);
  for (std::string part; std::getline(parts, part, '/');) {
    if (!part.empty()) components.push_back(part);
  }
  // "dir/**" means every file below dir.
  if (components.back() == "**") components.push_back("*");
  Walk walk(std::move(components));
  walk.visit(pattern.front() == '/' ? fs::path("/") : fs::path(), 0);
  return walk.take();
}

}  // namespace ppfsdp::train
