#include "src/comm/call.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <string_view>
#include <utility>

namespace ppfsdp::comm {
namespace {

// The layout of an encoded call: these fields, the label's text, `size` sends, `size` receives.
enum Field { kKind, kDtype, kOpKind, kFactor, kRoot, kCount, kLabel, kFields };
constexpr int kTextWords = 8;
constexpr size_t kTextBytes = kTextWords * sizeof(int64_t);

using Fields = std::vector<int64_t>;

std::string text_of(const int64_t* call) {
  const char* text = reinterpret_cast<const char*>(call + kFields);
  return std::string(text, strnlen(text, kTextBytes));
}

Call decode(const int64_t* from) {
  Call call;
  call.kind = static_cast<Call::Kind>(from[kKind]);
  call.dtype = static_cast<c10::ScalarType>(from[kDtype]);
  call.op.kind = static_cast<ReduceOp::Kind>(from[kOpKind]);
  call.op.factor = std::bit_cast<double>(from[kFactor]);
  call.root = from[kRoot];
  call.count = from[kCount];
  call.label = text_of(from);
  return call;
}

/// A rank that lists another as member of the new group, which lists other members or has another
/// name for it.
std::optional<std::string> find_unequal_members(const int64_t* calls, int size,
                                                const std::vector<int>& names) {
  const auto call = [&](int rank) { return calls + rank * encoded_size(size); };
  const auto row = [&](int rank) { return call(rank) + kFields + kTextWords; };
  const auto name = [&](int rank) { return std::pair(call(rank)[kLabel], text_of(call(rank))); };
  const auto list = [&](int rank) {
    std::vector<int> members;
    for (int member = 0; member < size; ++member) {
      if (row(rank)[member] != 0) members.push_back(names[member]);
    }
    return members;
  };
  for (int rank = 0; rank < size; ++rank) {
    for (int member = 0; member < size; ++member) {
      if (row(rank)[member] == 0) continue;
      if (list(rank) != list(member)) {
        return fmt::format("rank {} passes the members {}, but rank {} passes {}", names[rank],
                           list(rank), names[member], list(member));
      }
      if (name(rank) != name(member)) {
        return fmt::format("rank {} calls the new group '{}', but rank {} calls it '{}'",
                           names[rank], name(rank).second, names[member], name(member).second);
      }
    }
  }
  return std::nullopt;
}

/// A rank that sends another more or less than that one expects.
std::optional<std::string> find_unequal_split(const int64_t* calls, int size,
                                              const std::vector<int>& names) {
  const auto row = [&](int rank) {
    return calls + rank * encoded_size(size) + kFields + kTextWords;
  };
  for (int from = 0; from < size; ++from) {
    for (int to = 0; to < size; ++to) {
      const int64_t sent = row(from)[to];
      const int64_t expected = row(to)[size + from];
      if (sent == expected) continue;
      return fmt::format("rank {} sends {} elements to rank {}, which expects {}", names[from],
                         sent, names[to], expected);
    }
  }
  return std::nullopt;
}

uint64_t mix(uint64_t x) {
  // The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every input bit changes every output bit
  // with a chance near one half.
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9u;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

const char* name_of(Call::Kind kind) {
  switch (kind) {
    case Call::Kind::kAllGatherInto:
      return "all_gather_into";
    case Call::Kind::kReduceScatter:
      return "reduce_scatter";
    case Call::Kind::kAllReduce:
      return "all_reduce";
    case Call::Kind::kBroadcast:
      return "broadcast";
    case Call::Kind::kAllToAll:
      return "all_to_all";
    case Call::Kind::kMessage:
      return "message";
    case Call::Kind::kBarrier:
      return "barrier";
    case Call::Kind::kSubgroup:
      return "subgroup";
  }
  TORCH_INTERNAL_ASSERT(false, "unknown operation ", static_cast<int>(kind));
}

std::string Call::to_string() const {
  const std::string what = label.empty() ? "" : fmt::format(" for '{}'", label);
  switch (kind) {
    case Kind::kBarrier:
    case Kind::kSubgroup:
      return name_of(kind);
    case Kind::kAllToAll:
      return fmt::format("all_to_all of {}", c10::toString(dtype));
    case Kind::kBroadcast:
      return fmt::format("broadcast of {} {} from rank {}", count, c10::toString(dtype), root);
    case Kind::kReduceScatter:
    case Kind::kAllReduce:
      return fmt::format("{} of {} {} by {}{}", name_of(kind), count, c10::toString(dtype),
                         comm::to_string(op), what);
    default:
      return fmt::format("{} of {} {}{}", name_of(kind), count, c10::toString(dtype), what);
  }
}

size_t encoded_size(int size) { return kFields + kTextWords + 2 * static_cast<size_t>(size); }

void encode(const Call& call, int size, int64_t* to) {
  std::fill(to, to + encoded_size(size), 0);
  to[kKind] = static_cast<int64_t>(call.kind);
  to[kDtype] = static_cast<int64_t>(call.dtype);
  to[kOpKind] = static_cast<int64_t>(call.op.kind);
  to[kFactor] = std::bit_cast<int64_t>(call.op.factor);
  to[kRoot] = call.root;
  to[kCount] = call.count;
  to[kLabel] = static_cast<int64_t>(hash(call.label));
  // Names of modules differ at their ends.
  const std::string_view label = call.label;
  const std::string_view text = label.substr(label.size() - std::min(label.size(), kTextBytes));
  std::copy(text.begin(), text.end(), reinterpret_cast<char*>(to + kFields));
  int64_t* const splits = to + kFields + kTextWords;
  std::copy(call.sends.begin(), call.sends.end(), splits);
  std::copy(call.receives.begin(), call.receives.end(), splits + size);
}

std::optional<std::string> find_difference(const int64_t* calls, int size,
                                           const std::vector<int>& names) {
  const auto of = [&](int rank) { return calls + rank * encoded_size(size); };
  const auto fields = [&](int rank) {
    Fields fields(of(rank), of(rank) + kFields);
    // Ranks of different new groups may give them different names.
    if (static_cast<Call::Kind>(fields[kKind]) == Call::Kind::kSubgroup) fields[kLabel] = 0;
    return fields;
  };
  std::map<Fields, int> votes;
  for (int rank = 0; rank < size; ++rank) ++votes[fields(rank)];
  if (votes.size() > 1) {
    // The lowest rank among those with the most votes speaks for the group.
    int speaker = 0;
    for (int rank = 1; rank < size; ++rank) {
      if (votes[fields(rank)] > votes[fields(speaker)]) speaker = rank;
    }
    for (int rank = 0; rank < size; ++rank) {
      if (fields(rank) == fields(speaker)) continue;
      const Call odd = decode(of(rank));
      const Call usual = decode(of(speaker));
      if (odd.kind == Call::Kind::kMessage && usual.kind == Call::Kind::kMessage) {
        return fmt::format("rank {} sends {} {}, rank {} receives {} {}", names[0],
                           decode(of(0)).count, c10::toString(decode(of(0)).dtype), names[1],
                           decode(of(1)).count, c10::toString(decode(of(1)).dtype));
      }
      return fmt::format("rank {} differs: it calls {}, rank {} calls {}", names[rank],
                         odd.to_string(), names[speaker], usual.to_string());
    }
  }
  const auto first = static_cast<Call::Kind>(of(0)[kKind]);
  if (first == Call::Kind::kSubgroup) return find_unequal_members(calls, size, names);
  if (first == Call::Kind::kAllToAll) return find_unequal_split(calls, size, names);
  return std::nullopt;
}

uint64_t hash(std::initializer_list<uint64_t> values) {
  uint64_t state = 0;
  for (const uint64_t value : values) state = mix(state + 0x9e3779b97f4a7c15u + mix(value));
  return state;
}

uint64_t hash(std::string_view text) {
  uint64_t state = text.size();
  for (size_t i = 0; i < text.size(); i += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, text.data() + i, std::min(sizeof(word), text.size() - i));
    state = mix(state + 0x9e3779b97f4a7c15u + mix(word));
  }
  return state;
}

uint32_t make_tag(std::initializer_list<uint64_t> values) {
  return static_cast<uint32_t>(hash(values) >> 33);
}

}  // namespace ppfsdp::comm
