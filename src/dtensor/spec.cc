#include "src/dtensor/spec.h"

#include <algorithm>
#include <bit>
#include <mutex>
#include <unordered_map>

#include "fmt/format.h"
#include "fmt/ranges.h"
#include "src/dtensor/sharding.h"

namespace ppfsdp::dtensor {
namespace {

using Words = std::vector<int64_t>;

struct WordsHash {
  size_t operator()(const Words& words) const {
    uint64_t hash = 0x9e3779b97f4a7c15ULL;
    for (int64_t word : words) {
      hash = (hash ^ static_cast<uint64_t>(word)) * 0xff51afd7ed558ccdULL;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

struct Entry {
  uint64_t id = 0;
  std::weak_ptr<const Spec> spec;
};

/// A mesh's specs. An entry outlives its Spec, so that an equal Spec made later has the same id and
/// finds what was cached for it. Holding the Spec itself would keep the mesh alive for ever.
struct MeshSpecs {
  std::weak_ptr<const mesh::DeviceMesh> mesh;
  std::unordered_map<Words, Entry, WordsHash> entries;
  size_t prune_at = 4096;

  /// Shapes that never come again, of varying batches say, must not pile up.
  void prune() {
    if (entries.size() >= prune_at) {
      std::erase_if(entries, [](const auto& item) { return item.second.spec.expired(); });
      prune_at = std::max<size_t>(4096, 2 * entries.size());
    }
  }
};

struct Interner {
  std::mutex mutex;
  uint64_t next_id = 1;
  std::unordered_map<const mesh::DeviceMesh*, MeshSpecs> meshes;

  MeshSpecs& specs_of(const mesh::DeviceMeshPtr& mesh) {
    auto found = meshes.find(mesh.get());
    if (found != meshes.end() && !found->second.mesh.expired()) {
      return found->second;
    }
    // A new mesh, perhaps at the address of one that has gone: drop what no mesh needs any more.
    std::erase_if(meshes, [](const auto& item) { return item.second.mesh.expired(); });
    MeshSpecs& specs = meshes[mesh.get()];
    specs.mesh = mesh;
    return specs;
  }
};

Interner& interner() {
  // Never destroyed: DTensors in static storage may outlive any static of this file.
  static auto* instance = new Interner;
  return *instance;
}

Words words_of(const Placements& placements, c10::ArrayRef<int64_t> sizes,
               c10::ArrayRef<int64_t> strides, c10::ScalarType dtype) {
  Words words;
  words.reserve(2 + 4 * placements.size() + 2 * sizes.size());
  words.push_back(static_cast<int64_t>(dtype));
  words.push_back(static_cast<int64_t>(sizes.size()));
  for (const Placement& placement : placements) {
    words.push_back(static_cast<int64_t>(placement.kind()) * 16 +
                    static_cast<int64_t>(placement.partial_op()));
    words.push_back(placement.dim());
    words.push_back(placement.split_factor());
    words.push_back(std::bit_cast<int64_t>(placement.norm_order()));
  }
  words.insert(words.end(), sizes.begin(), sizes.end());
  words.insert(words.end(), strides.begin(), strides.end());
  return words;
}

}  // namespace

std::string Spec::str() const {
  return fmt::format("[{}], {}, {}, {}", fmt::join(sizes, ", "), c10::toString(dtype), mesh->str(),
                     to_string(placements));
}

SpecPtr make_spec(const mesh::DeviceMeshPtr& mesh, const Placements& placements,
                  c10::ArrayRef<int64_t> sizes, c10::ArrayRef<int64_t> strides,
                  c10::ScalarType dtype) {
  Words words = words_of(placements, sizes, strides, dtype);
  Interner& table = interner();
  const std::lock_guard<std::mutex> lock(table.mutex);
  MeshSpecs& specs = table.specs_of(mesh);
  specs.prune();
  Entry& entry = specs.entries[std::move(words)];
  if (SpecPtr spec = entry.spec.lock()) {
    return spec;
  }
  if (entry.id == 0) {
    entry.id = table.next_id++;
  }
  SpecPtr spec = std::make_shared<const Spec>(
      Spec{mesh, placements, sizes.vec(), strides.vec(), dtype,
           local_sizes(sizes, *mesh, placements, mesh->coordinates()), entry.id});
  entry.spec = spec;
  return spec;
}

SpecPtr with_placements(const Spec& spec, const Placements& placements) {
  return make_spec(spec.mesh, placements, spec.sizes, spec.strides, spec.dtype);
}

bool same_mesh(const mesh::DeviceMeshPtr& a, const mesh::DeviceMeshPtr& b) {
  return a == b || *a == *b;
}

}  // namespace ppfsdp::dtensor
