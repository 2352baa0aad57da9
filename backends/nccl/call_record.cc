#include "backends/nccl/call_record.h"

#include <algorithm>

namespace ppfsdp::nccl {

size_t record_words() { return comm::encoded_size(0); }

void write_record(const comm::Call& call, int64_t* to) {
  comm::Call bare = call;
  bare.sends.clear();
  bare.receives.clear();
  comm::encode(bare, 0, to);
}

std::optional<std::string> find_record_difference(const int64_t* records, int size,
                                                  const std::vector<int>& names) {
  const size_t words = record_words();
  const auto record = [&](int rank) { return records + rank * words; };
  bool equal = true;
  for (int rank = 1; rank < size && equal; ++rank) {
    equal = std::equal(record(0), record(1), record(rank));
  }
  if (equal) return std::nullopt;
  // An encoded call is its record and then its lists; with empty lists only the records differ.
  const size_t whole = comm::encoded_size(size);
  std::vector<int64_t> calls(size * whole, 0);
  for (int rank = 0; rank < size; ++rank) {
    std::copy(record(rank), record(rank) + words, calls.begin() + rank * whole);
  }
  return comm::find_difference(calls.data(), size, names);
}

bool has_lists(comm::Call::Kind kind) {
  return kind == comm::Call::Kind::kAllToAll || kind == comm::Call::Kind::kSubgroup;
}

}  // namespace ppfsdp::nccl
