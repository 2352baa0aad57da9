#include "src/cli/command_line.h"

#include <gtest/gtest.h>

#include "src/train/config_error.h"
#include "src/train/test_util.h"

namespace ppfsdp::cli {
namespace {

using Arguments = std::vector<std::string>;
using Action = CommandLine::Action;

std::string error_of(const Arguments& arguments) {
  return train::message_of<train::ConfigError>([&] { parse_command_line(arguments); });
}

TEST(CommandLineTest, reads_what_each_subcommand_takes) {
  const CommandLine train =
      parse_command_line({"train", "a.toml", "--set", "x.y=1", "--set=z.w=2"});
  EXPECT_EQ(train.action, Action::kTrain);
  EXPECT_EQ(train.config.file, "a.toml");
  EXPECT_EQ(train.config.overrides, (Arguments{"x.y=1", "z.w=2"}));
  EXPECT_EQ(parse_command_line({"verify"}).mode, train::VerifyMode::kExact);
  EXPECT_EQ(parse_command_line({"verify", "--exact"}).mode, train::VerifyMode::kExact);
  EXPECT_EQ(parse_command_line({"verify", "--tolerance"}).mode, train::VerifyMode::kTolerance);
  EXPECT_TRUE(parse_command_line({"train", "--print-config"}).config.print_config);
  EXPECT_FALSE(train.config.dry_run);
  EXPECT_TRUE(parse_command_line({"train", "--dry-run"}).config.dry_run);
  EXPECT_NE(error_of({"verify", "--dry-run"}).find("verify: there is no option --dry-run"),
            std::string::npos);
}

// What follows the command's name is the command's, with and without "--", options too.
TEST(CommandLineTest, launch_passes_all_on) {
  const Arguments command = {"train", "--set", "a.b=c", "--help"};
  for (const Arguments& head :
       {Arguments{"launch", "-n", "3", "--grace", "2"}, Arguments{"launch", "-n3", "--grace=2"},
        Arguments{"launch", "--processes", "3", "--grace", "2", "--"}}) {
    Arguments all = head;
    all.insert(all.end(), command.begin(), command.end());
    const CommandLine line = parse_command_line(all);
    EXPECT_EQ(line.action, Action::kLaunch);
    EXPECT_EQ(line.launch.processes, 3);
    EXPECT_EQ(line.launch.grace_s, 2);
    EXPECT_EQ(line.launch.command, command);
  }
}

// torchrun's spellings, dashes or not; what is the command's stays as it is.
TEST(CommandLineTest, launch_takes_torchruns_options) {
  const CommandLine line = parse_command_line(
      {"launch", "--nnodes=2", "--node_rank", "1", "--nproc_per_node=4", "--master_addr", "node_0",
       "--master-port", "1234", "train", "--set", "data.seq_len=2"});
  EXPECT_EQ(line.launch.nodes, 2);
  EXPECT_EQ(line.launch.node_rank, 1);
  EXPECT_EQ(line.launch.processes, 4);
  EXPECT_EQ(line.launch.master_addr, "node_0");
  EXPECT_EQ(line.launch.port, 1234);
  EXPECT_EQ(line.launch.command, (Arguments{"train", "--set", "data.seq_len=2"}));
  EXPECT_EQ(parse_command_line({"launch", "train"}, {{"PET_NPROC_PER_NODE", "3"}}).launch.processes,
            3);
}

TEST(CommandLineTest, help_is_a_text) {
  for (const Arguments& arguments :
       {Arguments{"--help"}, Arguments{"-h"}, Arguments{"train", "--help"},
        Arguments{"verify", "--help"}, Arguments{"launch", "--help"}, Arguments{"launch", "-h"}}) {
    const CommandLine line = parse_command_line(arguments);
    EXPECT_EQ(line.action, Action::kHelp);
    EXPECT_NE(line.help.find("--help"), std::string::npos);
  }
}

TEST(CommandLineTest, names_what_was_meant) {
  EXPECT_EQ(error_of({"trian"}), "there is no subcommand trian; did you mean train?");
  EXPECT_EQ(error_of({"sing"}),
            "there is no subcommand sing; the subcommands are train, verify, launch");
  EXPECT_EQ(error_of({"train", "--sett", "a=b"}),
            "train: there is no option --sett; did you mean --set?");
  EXPECT_EQ(error_of({"verify", "--toleranse"}),
            "verify: there is no option --toleranse; did you mean --tolerance?");
  EXPECT_EQ(error_of({"train", "--steps", "3"}),
            "train: there is no option --steps; did you mean --set training.steps=VALUE?");
  EXPECT_EQ(error_of({"train", "--optimizer.lr=3"}),
            "train: there is no option --optimizer.lr; did you mean --set optimizer.lr=VALUE?");
  EXPECT_EQ(error_of({"train", "--global-batch", "3"}),
            "train: there is no option --global-batch; did you mean --set "
            "training.global_batch=VALUE?");
  EXPECT_EQ(error_of({"launch", "--prot", "3", "train"}),
            "launch: there is no option --prot; did you mean --port?");
  EXPECT_EQ(error_of({"launch", "--dry-run", "-n", "2", "--", "train"}),
            "launch: there is no option --dry-run; see ppfsdp launch --help");
  EXPECT_EQ(error_of({"train", "-x"}), "train: there is no option -x; see ppfsdp train --help");
}

TEST(CommandLineTest, what_is_missing_or_too_much) {
  EXPECT_EQ(error_of({}), "a subcommand is missing: train, verify, launch");
  EXPECT_EQ(error_of({"launch"}),
            "launch: what to start is missing, as in ppfsdp launch -n 2 -- train");
  EXPECT_EQ(error_of({"launch", "-n", "2", "--"}), error_of({"launch"}));
  EXPECT_EQ(error_of({"train", "a", "b"}),
            "train: the argument b is one too many; see ppfsdp train --help");
  EXPECT_NE(error_of({"verify", "--exact", "--tolerance"}), "");
  EXPECT_NE(error_of({"launch", "-n", "0", "train"}), "");
  EXPECT_NE(error_of({"launch", "-n", "two", "train"}), "");
  EXPECT_NE(error_of({"train", "--set"}), "");
  EXPECT_EQ(error_of({"launch", "--grace", "nan", "train"}), "--grace: nan is no number");
}

}  // namespace
}  // namespace ppfsdp::cli
