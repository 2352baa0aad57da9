#include "src/cli/config_options.h"

#include "src/cli/runtimes.h"
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

train::Config read_config(const ConfigOptions& options) {
  train::Config config = resolve_backend(train::load_config(options.file, options.overrides));
  train::check_config(config);
  return config;
}

}  // namespace ppfsdp::cli
