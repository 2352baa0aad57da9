#include "src/cli/config_options.h"

#include <stdexcept>
#include <string>

#include "src/comm/host_memory.h"
#include "src/train/memory_need.h"
#include "src/train/recipe.h"

namespace ppfsdp::cli {

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

RunPlan read_config(const ConfigOptions& options, const std::optional<start::Launched>& launched) {
  RunPlan plan = resolve_backend(train::load_config(options.file, options.overrides), launched);
  train::check_config(plan.config);
  const bool on_gpus = plan.config.communication.backend == "nccl";
  if (!options.print_config && !options.dry_run && !on_gpus) {
    // Before anything is allocated: the system would end the process without a word.
    const int64_t processes = plan.launched ? plan.launched->local_world_size : 1;
    const std::string refusal = train::refuse_memory(
        plan.config, static_cast<double>(comm::physical_memory_bytes()), processes);
    if (!refusal.empty()) throw std::runtime_error(refusal);
  }
  return plan;
}

}  // namespace ppfsdp::cli
