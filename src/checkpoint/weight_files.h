#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "src/checkpoint/safetensors.h"

namespace ppfsdp::checkpoint {

/// The tensors of one safetensors file, or of several that belong together.
class WeightFiles {
 public:
  /// `path`: a .safetensors file; or an index (.json, as Hugging Face writes it) whose "weight_map"
  /// says in which file beside it each tensor is; or a folder that holds the index
  /// model.safetensors.index.json or the one file model.safetensors. Reads all headers. Throws
  /// c10::Error, naming the file, for what SafetensorsFile refuses, an index that is none, names a
  /// file elsewhere or a tensor that its file lacks, and a folder without either.
  explicit WeightFiles(const std::filesystem::path& path);

  /// In bytewise order.
  const std::vector<std::string>& names() const { return names_; }
  bool contains(const std::string& name) const { return file_of_.contains(name); }
  /// The file that has the tensor `name`, which must be one of names().
  const SafetensorsFile& file(const std::string& name) const { return *file_of_.at(name); }
  /// As it was given.
  const std::filesystem::path& path() const { return path_; }

 private:
  const SafetensorsFile& open(const std::filesystem::path& path);
  void read_index(const std::filesystem::path& index);

  std::filesystem::path path_;
  std::map<std::filesystem::path, SafetensorsFile> files_;
  std::map<std::string, const SafetensorsFile*> file_of_;
  std::vector<std::string> names_;
};

}  // namespace ppfsdp::checkpoint
