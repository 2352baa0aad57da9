#include "src/checkpoint/weight_files.h"

#include <c10/util/Exception.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "src/checkpoint/strict_json.h"

namespace ppfsdp::checkpoint {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr const char* kIndexName = "model.safetensors.index.json";
constexpr const char* kFileName = "model.safetensors";

bool is_regular(const fs::path& path) {
  std::error_code ignored;
  return fs::is_regular_file(path, ignored);
}

bool is_folder(const fs::path& path) {
  std::error_code ignored;
  return fs::is_directory(path, ignored);
}

}  // namespace

WeightFiles::WeightFiles(const fs::path& path) : path_(path) {
  fs::path file = path;
  if (is_folder(path)) {
    file = path / kIndexName;
    if (!is_regular(file)) file = path / kFileName;
    TORCH_CHECK(is_regular(file), path.string(), ": a folder of weights holds ", kIndexName, " or ",
                kFileName, ", this one neither; name the file");
  }
  if (file.extension() == ".json") {
    read_index(file);
  } else {
    const SafetensorsFile& opened = open(file);
    for (const std::string& name : opened.names()) file_of_[name] = &opened;
  }
  for (const auto& [name, from] : file_of_) names_.push_back(name);
}

const SafetensorsFile& WeightFiles::open(const fs::path& path) {
  const auto found = files_.find(path);
  return found != files_.end() ? found->second
                               : files_.emplace(path, SafetensorsFile(path)).first->second;
}

void WeightFiles::read_index(const fs::path& index) {
  TORCH_CHECK(is_regular(index), index.string(), ": can't read: not a regular file");
  std::ifstream stream(index, std::ios::binary);
  TORCH_CHECK(stream, index.string(), ": can't open: ", std::strerror(errno));
  const std::string text{std::istreambuf_iterator<char>(stream), {}};
  const Json json = parse_strictly(text, index.string() + ": the index", 0);
  TORCH_CHECK(json.is_object() && json.contains("weight_map") && json.at("weight_map").is_object(),
              index.string(), ": an index has an object \"weight_map\" {tensor: file}");
  for (const auto& [name, value] : json.at("weight_map").items()) {
    TORCH_CHECK(value.is_string(), index.string(), ": the file of tensor '", name,
                "' must be a string, is ", shown(value));
    const fs::path file = value.get<std::string>();
    TORCH_CHECK(!file.empty() && file == file.filename() && file != "." && file != "..",
                index.string(), ": tensor '", name, "' is in ", shown(value),
                ", must be the name of a file beside the index");
    const SafetensorsFile& opened = open(index.parent_path() / file);
    TORCH_CHECK(opened.contains(name), opened.path().string(), ": there is no tensor '", name,
                "', which ", index.string(), " says is in it");
    file_of_[name] = &opened;
  }
}

}  // namespace ppfsdp::checkpoint
