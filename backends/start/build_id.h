#pragma once

#include <string>

namespace ppfsdp::start {

/// What tells one build of this program from another, for ranks to compare: a hash of the bytes of
/// its executable file, LibTorch's version, and a hash of the names and linker's build ids of the
/// LibTorch and NCCL libraries that are loaded. Equal on all machines that run the same files. Read
/// once a process, some milliseconds.
const std::string& build_id();

}  // namespace ppfsdp::start
