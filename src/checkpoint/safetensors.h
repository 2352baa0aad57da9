#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace ppfsdp::checkpoint {

/// A safetensors file: 8 bytes of header length (little endian), a JSON header {name: {dtype,
/// shape, data_offsets}}, then the tensors' bytes. Read by mapping it into memory; cheap to copy.
class SafetensorsFile {
 public:
  /// Checks the whole header. Throws c10::Error, naming the file and the byte offset in it, for: a
  /// file that can't be read, a header or data cut short, bad JSON, a name that comes twice, an
  /// unknown dtype, a bad shape, offsets out of order or out of the file, a length that does not
  /// fit shape and dtype, tensors that overlap, bytes that belong to no tensor.
  explicit SafetensorsFile(const std::filesystem::path& path);

  /// In the order of their data.
  const std::vector<std::string>& names() const { return names_; }
  bool contains(const std::string& name) const { return entries_.contains(name); }
  /// The tensor's values. Shares the mapped file's memory where its alignment permits; writing to
  /// it does not reach the file. An unknown name is an error.
  at::Tensor tensor(const std::string& name) const;
  /// Of the tensor `name`; an unknown name is an error.
  at::ScalarType dtype(const std::string& name) const { return entry(name).dtype; }
  const std::vector<int64_t>& sizes(const std::string& name) const { return entry(name).shape; }
  /// Reads into `part` (contiguous, on the CPU, of the tensor's dtype) the part of the tensor that
  /// has part's sizes and begins at `begin`, one index a dim. Reads the file, and of it that part
  /// alone, not the mapping: pages that were touched stay in no one's memory. A file that has been
  /// replaced, changed or cut short since its header was read is an error.
  void read(const std::string& name, c10::IntArrayRef begin, const at::Tensor& part) const;
  /// The header's "__metadata__".
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const std::filesystem::path& path() const { return path_; }

 private:
  struct Entry {
    at::ScalarType dtype;
    std::vector<int64_t> shape;
    uint64_t begin, end;  // in the file
  };
  class Mapping;

  void parse_header(uint64_t header_length);
  const Entry& entry(const std::string& name) const;

  std::filesystem::path path_;
  std::shared_ptr<Mapping> mapping_;
  std::map<std::string, Entry> entries_;
  std::vector<std::string> names_;
  std::map<std::string, std::string> metadata_;
};

/// Writes CPU tensors (any strides) under distinct names. The file appears whole or not at all: it
/// is written beside `path` and renamed. Tensors are laid out by element size, largest first, then
/// by name, so that each is aligned. Throws, naming the file or the tensor, for an empty name or
/// one that comes twice, a tensor that is undefined or not on the CPU, a dtype the format lacks, a
/// file that can't be written.
void save_safetensors(const std::filesystem::path& path,
                      const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                      const std::map<std::string, std::string>& metadata = {});

}  // namespace ppfsdp::checkpoint
