#pragma once

#include <string>
#include <vector>

#include "src/comm/runtime.h"

namespace ppfsdp::checkpoint {

/// Every rank's `text`, in rank order, on every rank of the world.
std::vector<std::string> gather_texts(comm::Runtime& runtime, const std::string& text);

/// Throws c10::Error on every rank when any rank has a fault, with the lowest such rank's: a rank
/// that alone met a fault and threw would leave the others waiting. An empty text is no fault.
void agree_on_faults(comm::Runtime& runtime, const std::string& fault);

}  // namespace ppfsdp::checkpoint
