#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "src/comm/call.h"

namespace ppfsdp::nccl {

/// What ranks send each other to compare their calls: of one length for every operation and group
/// size, because the ranks may disagree about the operation. It leaves out what comm::Call lists a
/// value a rank.
size_t record_words();
void write_record(const comm::Call& call, int64_t* to);

/// The first difference between the records of a group's members, record r at `records` + r *
/// record_words(), as comm::find_difference tells it.
std::optional<std::string> find_record_difference(const int64_t* records, int size,
                                                  const std::vector<int>& names);

/// Whether the call has lists, which are compared as whole encoded calls once the records agree.
bool has_lists(comm::Call::Kind kind);

}  // namespace ppfsdp::nccl
