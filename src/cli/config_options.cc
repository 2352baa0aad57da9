#include "src/cli/config_options.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "src/cli/runtimes.h"
#include "src/comm/host_memory.h"
#include "src/train/memory_need.h"
#include "src/train/recipe.h"

namespace ppfsdp::cli {
namespace {

/// How many of the launcher's processes run on this machine.
int64_t local_processes() {
  const char* count = std::getenv("LOCAL_WORLD_SIZE");
  return count == nullptr ? 1 : std::max(1L, std::strtol(count, nullptr, 10));
}

}  // namespace

void add_config_options(CLI::App& command, ConfigOptions& options) {
  command.add_option("CONFIG", options.file, "TOML file; without one every key has its default");
  command
      .add_option("--set", options.overrides,
                  "Override a key; may be given again: --set training.steps=10")
      ->type_name("SECTION.KEY=VALUE")
      // One value each, so that an argument after it is not taken for another.
      ->allow_extra_args(false);
  command.add_flag("--print-config", options.print_config,
                   "Print the config that results, as TOML, and end");
  command.footer("Config keys, with their defaults and units:\n\n" + train::describe_keys());
}

train::Config read_config(const ConfigOptions& options) {
  train::Config config = resolve_backend(train::load_config(options.file, options.overrides));
  train::check_config(config);
  if (!options.print_config && !options.dry_run) {
    // Before anything is allocated: the system would end the process without a word.
    const std::string refusal = train::refuse_memory(
        config, static_cast<double>(comm::physical_memory_bytes()), local_processes());
    if (!refusal.empty()) throw std::runtime_error(refusal);
  }
  return config;
}

}  // namespace ppfsdp::cli
