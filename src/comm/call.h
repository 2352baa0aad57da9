#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "src/comm/reduce_op.h"

namespace ppfsdp::comm {

/// After the first ones every 64th call of a group is compared: at a small part of the cost, a run
/// that goes wrong late still says so.
inline constexpr uint64_t kComparePeriod = 64;

/// What one rank asks for in an operation: all that must match between ranks.
struct Call {
  enum class Kind {
    kAllGatherInto,
    kReduceScatter,
    kAllReduce,
    kBroadcast,
    kAllToAll,
    kMessage,  ///< send on one side, recv on the other
    kBarrier,
    kSubgroup,
  };

  Kind kind = Kind::kBarrier;
  c10::ScalarType dtype = c10::ScalarType::Byte;
  ReduceOp op = {};
  int64_t root = 0;
  /// Elements of the larger of the tensors.
  int64_t count = 0;
  /// Of kAllToAll the elements to each rank, of kSubgroup 1 for each member; a value a rank.
  std::vector<int64_t> sends = {};
  /// Of kAllToAll the elements from each rank.
  std::vector<int64_t> receives = {};
  /// What the caller says it is for; of kSubgroup the new group's name.
  std::string label = {};

  /// "all_reduce of 10 Float by sum for 'layers.0'".
  std::string to_string() const;
};

/// The name of the operation as the caller knows it.
const char* name_of(Call::Kind kind);

/// How a call is sent to the other members of a group of `size`: always this many integers, since
/// the ranks may disagree about everything else. Of a label its hash and the last 64 bytes.
size_t encoded_size(int size);
void encode(const Call& call, int size, int64_t* to);

/// The first difference between the calls of the members of a group, call r encoded at `calls` + r
/// * encoded_size(size): "rank 2 differs: it calls ..., rank 0 calls ..."; nothing if all agree.
/// The rank that differs is one against the most frequent call. `names`: the members' ranks as the
/// text shall call them. Of a message the two members are its sender and its receiver.
std::optional<std::string> find_difference(const int64_t* calls, int size,
                                           const std::vector<int>& names);

/// A 31-bit tag for messages of one operation: equal values, equal tag. `values` are mixed well
/// enough that different ones collide with the chance of random tags.
uint32_t make_tag(std::initializer_list<uint64_t> values);

/// A 64-bit hash of a sequence.
uint64_t hash(std::initializer_list<uint64_t> values);
uint64_t hash(std::string_view text);

}  // namespace ppfsdp::comm
