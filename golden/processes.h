#pragma once

#include <string>
#include <vector>

namespace ppfsdp::golden {

/// Whether a launcher has made this process one of several (RANK is set).
bool launched();

/// Runs this program `world` times, with `arguments` (argv without its first) and the environment
/// that torchrun sets: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR 127.0.0.1, MASTER_PORT a free one.
/// Ends the others when one fails. Returns the exit code of the first that failed, 0 if none did;
/// 128 + n for one that signal n ended.
int run_processes(int world, const std::vector<std::string>& arguments);

}  // namespace ppfsdp::golden
