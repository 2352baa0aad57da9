#include "src/cli/command_line.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <sstream>
#include <string_view>

#include "src/cli/launch_flags.h"
#include "src/train/config_error.h"
#include "src/train/config_keys.h"

namespace ppfsdp::cli {
namespace {

using train::ConfigError;

constexpr const char* kLaunchExample = "ppfsdp launch -n 2 -- train";

/// Puts "--" before the command that launch is to start, so that all that follows is the command's,
/// and writes launch's own options with dashes (torchrun takes --nproc_per_node as well).
void mark_command(std::vector<std::string>& arguments) {
  // What launch does not know is taken to have no value, and refused later.
  constexpr std::string_view kTakeValues[] = {
      "-n",          "--processes",   "--nproc-per-node", "--nnodes",
      "--node-rank", "--master-addr", "--master-port",    "--port",
      "--grace"};
  for (size_t i = 1; i < arguments.size(); ++i) {
    std::string& argument = arguments[i];
    if (argument == "--") return;
    if (!argument.starts_with('-')) {
      arguments.insert(arguments.begin() + static_cast<std::ptrdiff_t>(i), "--");
      return;
    }
    const auto name_end = argument.begin() + static_cast<std::ptrdiff_t>(
                                                 std::min(argument.find('='), argument.size()));
    std::replace(argument.begin(), name_end, '_', '-');
    if (std::ranges::count(kTakeValues, argument) > 0) ++i;
  }
}

std::vector<std::string> subcommand_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands(nullptr)) names.push_back(command->get_name());
  return names;
}

bool has_subcommand(const CLI::App& app, const std::string& name) {
  return std::ranges::count(subcommand_names(app), name) > 0;
}

[[noreturn]] void refuse_subcommand(const CLI::App& app, const std::string& name) {
  const std::vector<std::string> names = subcommand_names(app);
  const std::string_view near = train::nearest(name, {names.begin(), names.end()});
  throw ConfigError(fmt::format("there is no subcommand {}; {}", name,
                                near.empty()
                                    ? fmt::format("the subcommands are {}", fmt::join(names, ", "))
                                    : fmt::format("did you mean {}?", near)));
}

/// An argument that `command` does not take.
[[noreturn]] void refuse(const CLI::App& command, const std::string& argument) {
  if (!argument.starts_with('-')) {
    throw ConfigError(fmt::format("{}: the argument {} is one too many; see ppfsdp {} --help",
                                  command.get_name(), argument, command.get_name()));
  }
  const std::string name = argument.substr(0, argument.find('='));
  std::vector<std::string> options;
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& known : option->get_lnames()) options.push_back("--" + known);
  }
  std::string hint = fmt::format("see ppfsdp {} --help", command.get_name());
  const std::string_view near = train::nearest(name, {options.begin(), options.end()});
  if (!near.empty()) hint = fmt::format("did you mean {}?", near);
  if (command.get_option_no_throw("--set") != nullptr) {
    // A config key that is written as an option, with or without its section.
    std::string key = name.substr(std::min(name.find_first_not_of('-'), name.size()));
    std::replace(key.begin(), key.end(), '-', '_');
    for (const train::Key& known : train::config_keys()) {
      if (key == known.name || key == known.key()) {
        hint = fmt::format("did you mean --set {}=VALUE?", known.name);
      }
    }
  }
  throw ConfigError(fmt::format("{}: there is no option {}; {}", command.get_name(), name, hint));
}

}  // namespace

CommandLine parse_command_line(std::vector<std::string> arguments,
                               const start::Environment& environment) {
  CommandLine line;
  CLI::App app(
      "Per-parameter fully sharded training on GPUs, CPUs, a simulated mesh or one device.",
      "ppfsdp");
  app.footer("ppfsdp SUBCOMMAND --help tells more.");

  CLI::App* train = app.add_subcommand("train", "Train a Llama; without arguments the debug one");
  add_config_options(*train, line.config);
  train->add_flag(
      "--dry-run", line.config.dry_run,
      "Build and shard the model without memory, print what a rank would hold, and end");

  CLI::App* verify = app.add_subcommand(
      "verify", "Show that sharded training equals one device's: bit for bit, or within tolerance");
  bool exact = false, tolerance = false;
  CLI::Option* exact_flag = verify->add_flag(
      "--exact", exact,
      "Equal bits against one process that runs the ranks in turn and folds as the mesh does "
      "(default)");
  verify
      ->add_flag("--tolerance", tolerance,
                 "Within a derived tolerance against one device over the whole batch")
      ->excludes(exact_flag);
  add_config_options(*verify, line.config);

  CLI::App* launch = app.add_subcommand(
      "launch", fmt::format("Start one process a rank: {} [...]", kLaunchExample));
  LaunchFlags launch_flags;
  add_launch_flags(*launch, launch_flags, line.launch);

  for (CLI::App* command : {train, verify, launch}) command->allow_extras();
  if (arguments.empty()) {
    throw ConfigError(
        fmt::format("a subcommand is missing: {}", fmt::join(subcommand_names(app), ", ")));
  }
  if (!arguments[0].starts_with('-') && !has_subcommand(app, arguments[0])) {
    refuse_subcommand(app, arguments[0]);
  }
  if (arguments[0] == launch->get_name()) mark_command(arguments);
  try {
    std::vector<std::string> reversed(arguments.rbegin(), arguments.rend());
    app.parse(reversed);
  } catch (const CLI::Success& success) {
    std::ostringstream text;
    app.exit(success, text, text);
    line.help = text.str();
    return line;
  } catch (const CLI::ExtrasError&) {
    refuse(app, arguments[0]);
  } catch (const CLI::ParseError& error) {
    throw ConfigError(error.what());
  }
  for (const CLI::App* command : {train, verify, launch}) {
    // CLI11 keeps a "--" before arguments that it need not have marked.
    for (const std::string& rest : command->remaining()) {
      if (rest != "--") refuse(*command, rest);
    }
  }
  if (launch->parsed()) {
    if (line.launch.command.empty()) {
      throw ConfigError(fmt::format("launch: what to start is missing, as in {}", kLaunchExample));
    }
    resolve_launch(launch_flags, environment, line.launch);
  }
  line.mode = tolerance ? train::VerifyMode::kTolerance : train::VerifyMode::kExact;
  line.action = train->parsed()    ? CommandLine::Action::kTrain
                : verify->parsed() ? CommandLine::Action::kVerify
                                   : CommandLine::Action::kLaunch;
  return line;
}

}  // namespace ppfsdp::cli
