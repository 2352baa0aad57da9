#include "src/checkpoint/safetensors.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <tuple>

#include "src/checkpoint/strict_json.h"

namespace ppfsdp::checkpoint {
namespace {

using Json = nlohmann::json;

static_assert(std::endian::native == std::endian::little, "safetensors is little endian");

constexpr uint64_t kLengthBytes = sizeof(uint64_t);
constexpr const char* kMetadata = "__metadata__";

struct Dtype {
  const char* name;
  at::ScalarType type;
};
constexpr Dtype kDtypes[] = {
    {"F64", at::kDouble},
    {"F32", at::kFloat},
    {"F16", at::kHalf},
    {"BF16", at::kBFloat16},
    {"I64", at::kLong},
    {"I32", at::kInt},
    {"I16", at::kShort},
    {"I8", at::kChar},
    {"U8", at::kByte},
    {"BOOL", at::kBool},
    {"F8_E4M3", at::kFloat8_e4m3fn},
    {"F8_E5M2", at::kFloat8_e5m2},
    {"C64", at::kComplexFloat},
};

std::optional<at::ScalarType> parse_dtype(const std::string& name) {
  for (const Dtype& dtype : kDtypes) {
    if (name == dtype.name) return dtype.type;
  }
  return std::nullopt;
}

const char* dtype_name(at::ScalarType type) {
  for (const Dtype& dtype : kDtypes) {
    if (type == dtype.type) return dtype.name;
  }
  return nullptr;
}

/// Where a tensor's header entry is read from, for its messages.
struct Place {
  const std::filesystem::path& path;
  const std::string& tensor;
};

/// A non-negative integer of the header, which JSON calls a number.
uint64_t header_integer(const Json& value, const Place& place, const char* what) {
  TORCH_CHECK(value.is_number_unsigned(), place.path.string(), ": tensor '", place.tensor,
              "' in the header (offset ", kLengthBytes, "): ", what, " holds ", shown(value),
              ", must be integers from 0");
  return value.get<uint64_t>();
}

/// Elements times bytes; an error for what no address space holds.
uint64_t byte_count(const std::vector<int64_t>& shape, at::ScalarType dtype, const Place& place) {
  uint64_t bytes = c10::elementSize(dtype);
  for (const int64_t size : shape) {
    TORCH_CHECK(
        size == 0 || bytes <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) / size,
        place.path.string(), ": tensor '", place.tensor, "' in the header (offset ", kLengthBytes,
        "): the shape is too large");
    bytes *= size;
  }
  return bytes;
}

std::string error_text() { return std::strerror(errno); }

/// A file that is open for reading; a pipe does not make the caller wait for a writer.
class File {
 public:
  explicit File(const std::filesystem::path& path)
      : path_(path), file_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
    TORCH_CHECK(file_ >= 0, path_.string(), ": can't open: ", error_text());
  }
  ~File() { ::close(file_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  int descriptor() const { return file_; }

  struct stat status() const {
    struct stat status {};
    TORCH_CHECK(::fstat(file_, &status) == 0, path_.string(), ": can't read: ", error_text());
    return status;
  }

  /// Exactly those bytes.
  void read(char* to, uint64_t bytes, uint64_t offset) const {
    while (bytes > 0) {
      const ssize_t got = ::pread(file_, to, bytes, static_cast<off_t>(offset));
      if (got < 0 && errno == EINTR) continue;
      TORCH_CHECK(got >= 0, path_.string(), ": can't read at offset ", offset, ": ", error_text());
      TORCH_CHECK(got > 0, path_.string(), ": cut short at offset ", offset,
                  " since its header was read");
      to += got;
      offset += got;
      bytes -= got;
    }
  }

 private:
  const std::filesystem::path& path_;
  int file_;
};

}  // namespace

/// A file in memory, copied on write.
class SafetensorsFile::Mapping {
 public:
  explicit Mapping(const std::filesystem::path& path) {
    const File file(path);
    status_ = file.status();
    TORCH_CHECK(S_ISREG(status_.st_mode), path.string(), ": not a regular file");
    size_ = static_cast<uint64_t>(status_.st_size);
    if (size_ == 0) return;
    void* address =
        ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE, file.descriptor(), 0);
    TORCH_CHECK(address != MAP_FAILED, path.string(), ": can't map ", size_,
                " bytes: ", error_text());
    data_ = static_cast<char*>(address);
  }
  ~Mapping() {
    if (data_ != nullptr) ::munmap(data_, size_);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  char* data() const { return data_; }
  uint64_t size() const { return size_; }

  /// Whether `file` is still the one that was mapped, and unchanged.
  bool is_of(const File& file) const {
    const struct stat now = file.status();
    return now.st_dev == status_.st_dev && now.st_ino == status_.st_ino &&
           now.st_size == status_.st_size && now.st_mtim.tv_sec == status_.st_mtim.tv_sec &&
           now.st_mtim.tv_nsec == status_.st_mtim.tv_nsec;
  }

 private:
  struct stat status_ {};
  char* data_ = nullptr;
  uint64_t size_ = 0;
};

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : path_(path), mapping_(std::make_shared<Mapping>(path)) {
  TORCH_CHECK(mapping_->size() >= kLengthBytes, path_.string(), ": cut short at offset ",
              mapping_->size(), ": the header's length alone takes ", kLengthBytes, " bytes");
  uint64_t header_length = 0;
  std::memcpy(&header_length, mapping_->data(), kLengthBytes);
  TORCH_CHECK(header_length <= mapping_->size() - kLengthBytes, path_.string(),
              ": the header is cut short at offset ", mapping_->size(),
              ": by its length at offset 0 it takes ", header_length, " bytes from offset ",
              kLengthBytes);
  parse_header(header_length);
}

void SafetensorsFile::parse_header(uint64_t header_length) {
  const Json header = parse_strictly({mapping_->data() + kLengthBytes, header_length},
                                     path_.string() + ": the header", kLengthBytes);
  TORCH_CHECK(header.is_object(), path_.string(), ": the header at offset ", kLengthBytes,
              " must be a JSON object, is ", header.type_name());
  const uint64_t data_begin = kLengthBytes + header_length;
  for (const auto& [name, value] : header.items()) {
    if (name == kMetadata) {
      TORCH_CHECK(value.is_object(), path_.string(), ": ", kMetadata, " in the header (offset ",
                  kLengthBytes, ") must be an object of strings");
      for (const auto& [key, text] : value.items()) {
        TORCH_CHECK(text.is_string(), path_.string(), ": ", kMetadata, " in the header (offset ",
                    kLengthBytes, "): '", key, "' must be a string, is ", text.type_name());
        metadata_[key] = text.get<std::string>();
      }
      continue;
    }
    const Place place{path_, name};
    const auto field = [&](const char* key) -> const Json& {
      TORCH_CHECK(value.is_object() && value.contains(key), path_.string(), ": tensor '", name,
                  "' in the header (offset ", kLengthBytes, ") has no ", key);
      return value.at(key);
    };
    const Json& dtype_field = field("dtype");
    const Json& shape_field = field("shape");
    const Json& offsets = field("data_offsets");
    const std::optional<at::ScalarType> dtype =
        dtype_field.is_string() ? parse_dtype(dtype_field.get<std::string>()) : std::nullopt;
    TORCH_CHECK(dtype.has_value(), path_.string(), ": tensor '", name, "' in the header (offset ",
                kLengthBytes, ") has the unknown dtype ", shown(dtype_field));
    TORCH_CHECK(shape_field.is_array(), path_.string(), ": tensor '", name,
                "' in the header (offset ", kLengthBytes, "): the shape must be a list");
    TORCH_CHECK(offsets.is_array() && offsets.size() == 2, path_.string(), ": tensor '", name,
                "' in the header (offset ", kLengthBytes,
                "): data_offsets must be a list of two, begin and end");
    Entry entry{.dtype = *dtype, .shape = {}, .begin = 0, .end = 0};
    for (const Json& size : shape_field) {
      entry.shape.push_back(static_cast<int64_t>(header_integer(size, place, "the shape")));
      TORCH_CHECK(entry.shape.back() >= 0, path_.string(), ": tensor '", name,
                  "' in the header (offset ", kLengthBytes, "): the shape is too large");
    }
    const uint64_t begin = header_integer(offsets[0], place, "data_offsets");
    const uint64_t end = header_integer(offsets[1], place, "data_offsets");
    const uint64_t available = mapping_->size() - data_begin;
    TORCH_CHECK(begin <= end, path_.string(), ": tensor '", name, "': data_offsets [", begin, ", ",
                end, "] run backwards");
    TORCH_CHECK(end <= available, path_.string(), ": the data is cut short at offset ",
                mapping_->size(), ": tensor '", name, "' ends at offset ",
                end <= std::numeric_limits<uint64_t>::max() - data_begin ? data_begin + end : end);
    const uint64_t bytes = byte_count(entry.shape, entry.dtype, place);
    TORCH_CHECK(end - begin == bytes, path_.string(), ": tensor '", name, "' at offset ",
                data_begin + begin, " has ", end - begin, " bytes of data; its shape and dtype ",
                dtype_field.get<std::string>(), " need ", bytes);
    entry.begin = data_begin + begin;
    entry.end = data_begin + end;
    entries_.emplace(name, std::move(entry));
    names_.push_back(name);
  }
  std::ranges::sort(names_, [this](const std::string& a, const std::string& b) {
    const Entry &x = entries_.at(a), &y = entries_.at(b);
    return std::tie(x.begin, x.end, a) < std::tie(y.begin, y.end, b);
  });
  uint64_t reached = data_begin;
  const std::string* before = nullptr;
  for (const std::string& name : names_) {
    const Entry& entry = entries_.at(name);
    TORCH_CHECK(entry.begin >= reached, path_.string(), ": tensors '", *before, "' and '", name,
                "' overlap at offset ", entry.begin);
    TORCH_CHECK(entry.begin == reached, path_.string(), ": the bytes from offset ", reached, " to ",
                entry.begin, " belong to no tensor");
    reached = entry.end;
    before = &name;
  }
  TORCH_CHECK(reached == mapping_->size(), path_.string(), ": the bytes from offset ", reached,
              " to ", mapping_->size(), " belong to no tensor");
}

const SafetensorsFile::Entry& SafetensorsFile::entry(const std::string& name) const {
  const auto found = entries_.find(name);
  TORCH_CHECK(found != entries_.end(), path_.string(), ": there is no tensor '", name, "'");
  return found->second;
}

void SafetensorsFile::read(const std::string& name, c10::IntArrayRef begin,
                           const at::Tensor& part) const {
  const Entry& from = entry(name);
  const auto dims = static_cast<int64_t>(from.shape.size());
  bool fits = part.dim() == dims && static_cast<int64_t>(begin.size()) == dims;
  for (int64_t dim = 0; fits && dim < dims; ++dim) {
    fits = begin[dim] >= 0 && part.size(dim) <= from.shape[dim] - begin[dim];
  }
  TORCH_CHECK(fits, path_.string(), ": tensor '", name, "' of sizes ", c10::IntArrayRef(from.shape),
              " has no part of sizes ", part.sizes(), " at ", begin);
  TORCH_CHECK(part.is_cpu() && part.is_contiguous() && part.scalar_type() == from.dtype,
              path_.string(), ": tensor '", name, "' is read into a contiguous tensor of ",
              c10::toString(from.dtype), " on the CPU, got ", part.toString());
  if (part.numel() == 0) return;
  // From which dim on the part holds the whole tensor: what lies in one run.
  int64_t inner = dims;
  while (inner > 0 && part.size(inner - 1) == from.shape[inner - 1]) --inner;
  inner = std::max<int64_t>(inner - 1, 0);
  const File file(path_);
  TORCH_CHECK(mapping_->is_of(file), path_.string(),
              ": replaced, changed or cut short since its header was read");
  const auto element = static_cast<uint64_t>(c10::elementSize(from.dtype));
  uint64_t run = element, runs = 1;
  for (int64_t dim = 0; dim < dims; ++dim) (dim < inner ? runs : run) *= part.size(dim);
  auto* to = static_cast<char*>(part.mutable_data_ptr());
  for (uint64_t i = 0; i < runs; ++i) {
    uint64_t index = i, stride = element, offset = from.begin;
    for (int64_t dim = dims - 1; dim >= 0; --dim) {
      uint64_t place = begin[dim];
      if (dim < inner) {
        place += index % part.size(dim);
        index /= part.size(dim);
      }
      offset += place * stride;
      stride *= from.shape[dim];
    }
    file.read(to + i * run, run, offset);
  }
}

at::Tensor SafetensorsFile::tensor(const std::string& name) const {
  const Entry& entry = this->entry(name);
  char* data = mapping_->data() + entry.begin;
  const auto options = at::TensorOptions().dtype(entry.dtype);
  if (entry.begin == entry.end) return at::empty(entry.shape, options);
  if (reinterpret_cast<uintptr_t>(data) % c10::elementSize(entry.dtype) != 0) {
    const at::Tensor copy = at::empty(entry.shape, options);
    std::memcpy(copy.data_ptr(), data, entry.end - entry.begin);
    return copy;
  }
  return at::from_blob(
      data, entry.shape, [keep = mapping_](void*) {}, options);
}

void save_safetensors(const std::filesystem::path& path,
                      const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                      const std::map<std::string, std::string>& metadata) {
  std::vector<std::pair<std::string, at::Tensor>> sorted;
  for (const auto& [name, tensor] : tensors) {
    TORCH_CHECK(!name.empty() && name != kMetadata, path.string(), ": a tensor can't be called '",
                name, "'");
    TORCH_CHECK(tensor.defined() && tensor.device().is_cpu() && tensor.has_storage(), path.string(),
                ": tensor '", name, "' has no memory on the CPU; pass a full, local tensor");
    TORCH_CHECK(dtype_name(tensor.scalar_type()) != nullptr, path.string(), ": tensor '", name,
                "' is ", c10::toString(tensor.scalar_type()),
                ", which safetensors has no name for");
    sorted.emplace_back(name, tensor.detach().contiguous());
  }
  std::ranges::sort(sorted, [](const auto& a, const auto& b) {
    const auto larger = std::make_pair(b.second.element_size(), a.first);
    return larger < std::make_pair(a.second.element_size(), b.first);
  });

  Json header = Json::object();
  if (!metadata.empty()) header[kMetadata] = metadata;
  uint64_t offset = 0;
  for (const auto& [name, tensor] : sorted) {
    TORCH_CHECK(!header.contains(name), path.string(), ": two tensors are called '", name, "'");
    header[name] = {{"dtype", dtype_name(tensor.scalar_type())},
                    {"shape", tensor.sizes().vec()},
                    {"data_offsets", {offset, offset + tensor.nbytes()}}};
    offset += tensor.nbytes();
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');

  const std::filesystem::path beside = path.string() + ".part";
  std::ofstream out(beside, std::ios::binary | std::ios::trunc);
  TORCH_CHECK(out, path.string(), ": can't create ", beside.string(), ": ", error_text());
  const uint64_t length = text.size();
  out.write(reinterpret_cast<const char*>(&length), kLengthBytes);
  out.write(text.data(), static_cast<std::streamsize>(text.size()));
  for (const auto& [name, tensor] : sorted) {
    if (tensor.numel() == 0) continue;
    out.write(static_cast<const char*>(tensor.const_data_ptr()),
              static_cast<std::streamsize>(tensor.nbytes()));
  }
  out.close();
  std::error_code failed;
  if (out) std::filesystem::rename(beside, path, failed);
  if (!out || failed) {
    const std::string problem = failed ? failed.message() : error_text();
    std::error_code ignored;
    std::filesystem::remove(beside, ignored);
    TORCH_CHECK(false, path.string(), ": can't write: ", problem);
  }
}

}  // namespace ppfsdp::checkpoint
