// Runs the ppfsdp binary as a user does.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "src/train/test_util.h"

namespace ppfsdp::cli {
namespace {

namespace fs = std::filesystem;

struct Result {
  int code;
  std::string out;
  std::string err;
};

class CliTest : public train::FolderTest {
 protected:
  void SetUp() override {
    FolderTest::SetUp();
    std::string text;
    for (int i = 0; i < 3000; ++i) text += "a few words of text "[i * i % 20];
    text_ = write("text.txt", text);
    binary_ = fs::absolute("src/cli/ppfsdp").string();
    // As `bazel run` does for the user's folder.
    setenv("BUILD_WORKING_DIRECTORY", folder_.c_str(), 1);
  }

  /// A model small enough for dozens of runs.
  std::string tiny(const std::string& more = "", int steps = 3) const {
    std::string arguments =
        fmt::format(" --set data.files={} --set training.steps={}", text_, steps);
    for (const char* setting :
         {"model.dim=8", "model.layers=1", "model.heads=2", "model.kv_heads=1", "model.hidden=12",
          "data.seq_len=6", "training.global_batch=8"}) {
      arguments += fmt::format(" --set {}", setting);
    }
    return arguments + " " + more;
  }

  std::string read(const std::string& name) const {
    std::ostringstream text;
    text << std::ifstream(folder_ / name, std::ios::binary).rdbuf();
    return text.str();
  }

  Result run(const std::string& arguments, const std::string& environment = "") const {
    const std::string command = fmt::format("{} {} {} >{} 2>{} </dev/null", environment, binary_,
                                            arguments, path("out"), path("err"));
    const int status = std::system(command.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read("out"), read("err")};
  }

  /// The run must fail with this code and exactly this one line.
  void expect_error(int code, const std::string& arguments, const std::string& message,
                    const std::string& environment = "") const {
    const Result result = run(arguments, environment);
    EXPECT_EQ(result.code, code) << arguments;
    EXPECT_EQ(result.err, "ppfsdp: error: " + message + "\n") << arguments;
    EXPECT_EQ(result.out, "") << arguments;
  }

  static std::vector<std::string> lines(const std::string& text) {
    std::vector<std::string> result;
    std::istringstream stream(text);
    for (std::string line; std::getline(stream, line);) result.push_back(line);
    return result;
  }

  /// The losses and norms that a training printed: what must not depend on the backend.
  static std::vector<std::string> losses(const std::string& out) {
    std::vector<std::string> result;
    for (const std::string& line : lines(out)) {
      const size_t begin = line.find("step:"), end = line.find("  tokens/s");
      if (begin != std::string::npos) result.push_back(line.substr(begin, end - begin));
    }
    return result;
  }

  std::string text_;
  std::string binary_;
};

TEST_F(CliTest, help_lists_every_key_with_default_and_unit) {
  for (const char* subcommand : {"train", "verify"}) {
    const Result help = run(fmt::format("{} --help", subcommand));
    EXPECT_EQ(help.code, 0);
    EXPECT_NE(help.out.find("[optimizer]"), std::string::npos);
    EXPECT_NE(help.out.find("  steps = 60 steps\n"), std::string::npos);
    EXPECT_NE(help.out.find("  timeout_s = 300.0 seconds\n"), std::string::npos);
    EXPECT_EQ(help.err, "");
  }
  EXPECT_NE(run("--help").out.find("launch"), std::string::npos);
  EXPECT_NE(run("launch --help").out.find("--grace"), std::string::npos);
}

TEST_F(CliTest, print_config_gives_a_config_that_reads_back) {
  const Result printed = run("train --print-config --set optimizer.lr=0.5");
  EXPECT_EQ(printed.code, 0);
  write("printed.toml", printed.out);
  EXPECT_EQ(run("train printed.toml --print-config").out, printed.out);
  EXPECT_NE(printed.out.find("lr = 0.5\n"), std::string::npos);
}

// Files are where the user stands, not where `bazel run` starts the binary.
TEST_F(CliTest, faults_of_the_config_are_one_line_and_code_2) {
  write("a.toml", "[training]\nstesp = 3\n");
  expect_error(2, "train a.toml",
               "a.toml:2: there is no key training.stesp; did you mean training.steps?");
  expect_error(2, "train missing.toml", "missing.toml: No such file or directory");
  expect_error(2, "train --set training.steps=0",
               "--set training.steps=0: training.steps must be an integer of at least 1, got the "
               "integer 0");
  expect_error(
      2, "train" + tiny("--set parallelism.ranks=3"),
      "training.global_batch = 8 is not divisible by 3 ranks x 1 microbatches; the nearest "
      "that is: 9");
  expect_error(2, "train" + tiny("--set parallelism.reshard_after_forward=3"),
               "parallelism.reshard_after_forward = 3 does not divide the 4 ranks");
  expect_error(2, "train --set parallelism.ranks=1025",
               "--set parallelism.ranks=1025: parallelism.ranks must be an integer from 1 to 1024, "
               "got the integer 1025");
  expect_error(2, "verify --set communication.backend=single",
               "communication.backend = \"single\" shards nothing, so there is nothing to verify; "
               "use \"sim\", or \"gloo\" under a launcher");
  expect_error(2, "train", "BUILD_WORKING_DIRECTORY=/no/where: No such file or directory",
               "BUILD_WORKING_DIRECTORY=/no/where");
}

TEST_F(CliTest, faults_of_the_data_are_one_line_and_code_2) {
  expect_error(2, "train --set data.files=no.txt", "data.files: no.txt: No such file or directory");
  expect_error(2, "train --set 'data.files=*.nothing'", "data.files: *.nothing: no file matches");
  expect_error(2, "train --set data.files=", "data.files: a path is empty");
  expect_error(2, "train --set 'data.files=[\"text.txt\", \"\"]'", "data.files: a path is empty");
  expect_error(2, "train --set data.files=.",
               "data.files: .: is a folder; to take the files in it write ./*");
  write("empty.txt", "");
  expect_error(2, "train --set data.files=empty.txt", "data.files: empty.txt: is empty");
  write("short.txt", "abc");
  expect_error(2, "train --set data.files=short.txt --set data.seq_len=3",
               "data.files: 3 tokens are too few for one sequence: data.seq_len = 3 needs 4");
  write("odd.bin", "abc");
  expect_error(2, "train --set data.kind=tokens --set data.files=odd.bin",
               "data.files: odd.bin: has 3 bytes, which is not a whole number of 2-byte tokens "
               "(data.dtype = \"uint16\")");
}

// A bad token shows only when a rank reads it; all ranks must end, with that rank's error.
TEST_F(CliTest, token_beyond_the_vocabulary_ends_all_ranks) {
  write("big.bin", std::string(400, '\x01'));  // ids 257
  const std::string arguments =
      tiny("--set data.kind=tokens --set data.files=big.bin --set metrics.jsonl=m.jsonl");
  const std::string without_text = arguments.substr(arguments.find("--set model"));
  const Result result = run("train " + without_text);
  EXPECT_EQ(result.code, 2);
  ASSERT_EQ(lines(result.err).size(), 1u) << result.err;
  EXPECT_NE(result.err.find("data.files: big.bin: token 257 at index "), std::string::npos)
      << result.err;
  EXPECT_FALSE(fs::exists(path("m.jsonl"))) << "no metrics of a run without a step";
  // Of processes too; the launcher tells whose error it was, and not what it did to the others.
  const Result launched = run("launch -n 2 -- train " + without_text);
  EXPECT_EQ(launched.code, 2);
  ASSERT_EQ(lines(launched.err).size(), 1u) << launched.err;
  EXPECT_NE(launched.err.find(": data.files: big.bin: token 257 at index "), std::string::npos)
      << launched.err;
}

TEST_F(CliTest, faults_of_the_command_line_are_one_line_and_code_2) {
  for (const char* arguments :
       {"", "trian", "train --sett a=b", "launch -n 0 -- train", "launch -n 2",
        "verify --exact --tolerance", "train a.toml b.toml", "launch -n two -- train"}) {
    const Result result = run(arguments);
    EXPECT_EQ(result.code, 2) << arguments;
    EXPECT_EQ(lines(result.err).size(), 1u) << arguments << "\n" << result.err;
    EXPECT_EQ(result.err.find("ppfsdp: error: "), 0u) << result.err;
  }
}

// The three backends, one training: with two ranks the order of a sum can't show.
TEST_F(CliTest, sim_gloo_and_one_device_print_the_same_losses) {
  const Result sim = run("train" + tiny("--set parallelism.ranks=2"));
  EXPECT_EQ(sim.code, 0) << sim.err;
  EXPECT_EQ(losses(sim.out).size(), 3u) << sim.out;
  const Result gloo = run("launch -n 2 -- train" + tiny());
  EXPECT_EQ(gloo.code, 0) << gloo.err;
  EXPECT_EQ(losses(gloo.out), losses(sim.out));
  for (const std::string& line : lines(gloo.out)) EXPECT_EQ(line.find("[0] "), 0u) << line;
  const Result single = run("train" + tiny("--set communication.backend=single"));
  EXPECT_EQ(single.code, 0) << single.err;
  EXPECT_EQ(losses(single.out).size(), 3u);
  // The first loss: before any gradient was summed, to four decimals.
  EXPECT_EQ(losses(single.out)[0], losses(sim.out)[0]);
}

TEST_F(CliTest, metrics_files) {
  const std::string arguments =
      "train" + tiny("--set metrics.jsonl=run/m.jsonl --set metrics.tensorboard=run/tb");
  EXPECT_EQ(run(arguments).code, 0);
  const std::vector<std::string> records = lines(read("run/m.jsonl"));
  ASSERT_EQ(records.size(), 3u);
  EXPECT_EQ(nlohmann::json::parse(records[2])["step"], 3);
  EXPECT_EQ(std::distance(fs::directory_iterator(path("run/tb")), {}), 1);
  expect_error(2, arguments,
               "metrics.jsonl: run/m.jsonl exists; remove it, or set metrics.if_exists to "
               "\"append\" or \"overwrite\"");
}

TEST_F(CliTest, metrics_that_can_not_be_written_are_one_line_and_code_2) {
  fs::create_directory(path("folder"));
  for (const char* policy : {"error", "append", "overwrite"}) {
    expect_error(2,
                 "train" + tiny(fmt::format("--set metrics.jsonl=folder --set metrics.if_exists={}",
                                            policy)),
                 "metrics.jsonl: folder is a folder; name a file");
  }
  expect_error(2, "train" + tiny("--set metrics.jsonl=text.txt/m.jsonl"),
               "metrics.jsonl: cannot make the folder text.txt: Not a directory");
  expect_error(2, "train" + tiny("--set metrics.tensorboard=text.txt"),
               "metrics.tensorboard: cannot make the folder text.txt: Not a directory");
}

// Refused before anything is allocated; the system would kill the process without a word.
TEST_F(CliTest, model_that_the_machine_can_not_hold) {
  const std::string lead =
      "ppfsdp: error: training model.name = \"llama3-405b\" needs at least 6047.7 GiB of memory on "
      "this machine, which has ";
  for (const char* command : {"train", "verify", "launch -n 2 -- train"}) {
    const Result result = run(fmt::format("{} --set model.name=llama3-405b", command));
    EXPECT_EQ(result.code, 1) << command;
    EXPECT_EQ(result.err.find(lead), 0u) << command << "\n" << result.err;
    EXPECT_EQ(lines(result.err).size(), 1u) << command << "\n" << result.err;
    EXPECT_EQ(result.out, "") << command;
  }
  EXPECT_EQ(run("train --print-config --set model.name=llama3-405b").code, 0);
}

// A model of any size, on any machine, without data.
TEST_F(CliTest, dry_run_counts_what_a_rank_would_hold) {
  const std::string dry_run = "train --dry-run --set model.name=llama2-7b --set data.files=nothing";
  const Result result = run(dry_run + " --set parallelism.ranks=8");
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.out,
            "model: llama2-7b (6738.42 M parameters)  backend: sim, 8 ranks  groups: 33\n"
            "a rank holds 12.55 GiB: parameters 3.14, gradients 3.14, optimizer state 6.28; all "
            "ranks together 100.41 GiB\n"
            "on top, while it computes: activations, and gathered groups of at most 0.98 GiB\n");
  const Result launched = run("launch -n 2 -- " + dry_run);
  EXPECT_EQ(launched.code, 0) << launched.err;
  EXPECT_EQ(lines(launched.out).size(), 3u) << launched.out;
  EXPECT_NE(launched.out.find("a rank holds 50.21 GiB"), std::string::npos) << launched.out;
}

// Said before the first step, by every rank, and by the launcher once.
TEST_F(CliTest, weights_that_do_not_fit_are_code_2) {
  write("not.safetensors", "short");
  for (const char* command : {"train", "launch -n 2 -- train"}) {
    const Result result = run(command + tiny("--set model.weights=not.safetensors"));
    EXPECT_EQ(result.code, 2) << result.err;
    EXPECT_EQ(losses(result.out), std::vector<std::string>());
    EXPECT_NE(result.err.find("model.weights = \"not.safetensors\": not.safetensors: cut short"),
              std::string::npos)
        << result.err;
  }
}

TEST_F(CliTest, verify_shows_equality_on_sim_and_gloo) {
  const Result exact = run("verify" + tiny());
  EXPECT_EQ(exact.code, 0) << exact.err;
  EXPECT_EQ(lines(exact.out).back(), "equal bit for bit: 3 steps");
  const Result tolerance = run("verify --tolerance" + tiny());
  EXPECT_EQ(tolerance.code, 0) << tolerance.err;
  EXPECT_EQ(lines(tolerance.out).back(), "equal within tolerance: 3 steps");
  const Result gloo = run("launch -n 4 -- verify" + tiny());
  EXPECT_EQ(gloo.code, 0) << gloo.err;
  EXPECT_EQ(lines(gloo.out).back(), "[0] equal bit for bit: 3 steps");
}

// Not once a rank: what the launcher can know it says itself.
TEST_F(CliTest, launch_says_once_what_is_wrong) {
  expect_error(2, "launch -n 2 -- train" + tiny("--set parallelism.ranks=5"),
               "parallelism.ranks = 5 does not fit communication.backend = \"gloo\", whose world "
               "here is 2");
  expect_error(2, "launch -n 2 -- trian", "there is no subcommand trian; did you mean train?");
  expect_error(2, "launch -n 2 -- launch -n 2 -- train",
               "launch starts train or verify, not another launch");
  // Here the ranks find it; whichever is first is named.
  const Result data = run("launch -n 2 -- train --set data.files=none.txt");
  EXPECT_EQ(data.code, 2);
  EXPECT_EQ(lines(data.err).size(), 1u) << data.err;
  EXPECT_NE(data.err.find(": data.files: none.txt: No such file or directory"), std::string::npos);
  EXPECT_EQ(run("launch -n 2 train --help").out, run("train --help").out);
  const Result config = run("launch -n 2 train --print-config");
  EXPECT_EQ(lines(config.out).front(), "[model]");
  EXPECT_NE(config.out.find("backend = \"gloo\""), std::string::npos) << config.out;
}

TEST_F(CliTest, config_that_is_no_file_of_toml) {
  expect_error(2, "train /dev/zero", "/dev/zero: is larger than 1 MiB, which is no config");
  expect_error(2, "train /proc/self/mem", "/proc/self/mem: cannot be read: Input/output error");
}

TEST_F(CliTest, numbers_out_of_range_say_the_range) {
  expect_error(2, "train --set training.seed=9000000000000001",
               "--set training.seed=9000000000000001: training.seed must be an integer of at least "
               "0, got the integer 9000000000000001; at most 9000000000000000");
  expect_error(
      2, "train --set optimizer.lr=inf",
      "--set optimizer.lr=inf: optimizer.lr must be a finite number of at least 0, got the "
      "number inf");
  expect_error(2, "train --set model.dim=9000000000000000",
               "--set model.dim=9000000000000000: model.dim must be an integer from 1 to 4194304, "
               "got the integer 9000000000000000");
}

TEST_F(CliTest, optimizer_that_can_not_be_made) {
  expect_error(2,
               "train --set optimizer.name=sgd --set optimizer.nesterov=true --set "
               "optimizer.momentum=0",
               "[optimizer]: SGD: momentum is 0, must be positive with nesterov");
}

// Its bits depend on the sharding: to say "differs" would blame the sharding for the kernel.
TEST_F(CliTest, verify_refuses_fused_kernels_on_several_ranks) {
  for (const char* mode : {"--exact", "--tolerance"}) {
    const Result result = run(fmt::format("verify {} --set optimizer.implementation=fused", mode));
    EXPECT_EQ(result.code, 2);
    EXPECT_EQ(lines(result.err).size(), 1u);
    EXPECT_NE(result.err.find("optimizer.implementation = \"fused\" cannot be verified"),
              std::string::npos)
        << result.err;
  }
  EXPECT_EQ(
      run("verify" + tiny("--set optimizer.implementation=fused --set parallelism.ranks=1")).code,
      0);
}

TEST_F(CliTest, half_of_a_launchers_variables) {
  expect_error(
      2, "train" + tiny(),
      "environment variable WORLD_SIZE is not set, but RANK is: a launcher such as torchrun "
      "sets both, and without one neither may be set",
      "RANK=0");
}

TEST_F(CliTest, nccl_where_it_can_not_run) {
  const Result plain = run("train --set communication.backend=nccl");
  const Result launched = run("launch -n 2 -- train --set communication.backend=nccl");
  for (const Result& result : {plain, launched}) {
    EXPECT_EQ(result.code, 2);
    EXPECT_EQ(result.out, "");
    EXPECT_EQ(lines(result.err).size(), 1u) << result.err;
    EXPECT_EQ(result.err.find("ppfsdp: error: communication.backend = \"nccl\": "), 0u)
        << result.err;
  }
}

TEST_F(CliTest, port_in_use_and_a_peer_that_never_comes) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size), 0);
  const int port = ntohs(address.sin_port);
  const std::string arguments = "train" + tiny("--set communication.timeout_s=1");
  // Whoever is rank 0 prints what it trains before it looks for the others.
  const auto expect_line = [&](int rank, const std::string& message) {
    const Result result =
        run(arguments,
            fmt::format("RANK={} WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={}", rank, port));
    EXPECT_EQ(result.code, 1);
    EXPECT_EQ(result.err, "ppfsdp: error: " + message + "\n");
  };
  ASSERT_EQ(listen(listener, 1), 0);
  expect_line(0, fmt::format("rendezvous: port {} of 127.0.0.1 is in use by another process; set "
                             "MASTER_PORT to a free port",
                             port));
  close(listener);
  expect_line(
      0, fmt::format("rendezvous at 127.0.0.1:{}: 1 of 2 ranks came within 1 s; missing: 1", port));
  expect_line(1,
              fmt::format("rendezvous: rank 1 of 2 found nobody listening at 127.0.0.1:{} within "
                          "1 s: rank 0 did not come",
                          port));
}

/// Starts the binary, sends it a signal once it has printed its first step, and waits.
class InterruptTest : public CliTest, public testing::WithParamInterface<std::string> {};

TEST_P(InterruptTest, ctrl_c_ends_all_ranks_after_one_step) {
  const std::string arguments = GetParam() + tiny("--set metrics.jsonl=m.jsonl", 1000000);
  const pid_t pid = fork();
  if (pid == 0) {
    const std::string command =
        fmt::format("exec {} {} >{} 2>{}", binary_, arguments, path("out"), path("err"));
    execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
    _exit(127);
  }
  int status = 0;
  while (read("out").find("step:") == std::string::npos) {
    ASSERT_EQ(waitpid(pid, &status, WNOHANG), 0) << "ended before its first step: " << read("err");
    usleep(10'000);
  }
  kill(pid, SIGINT);
  waitpid(pid, &status, 0);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 128 + SIGINT);
  const std::vector<std::string> errors = lines(read("err"));
  ASSERT_EQ(errors.size(), 1u) << read("err");
  EXPECT_NE(errors[0].find("ppfsdp: stopped by SIGINT after step "), std::string::npos)
      << errors[0];
  // All that was done is on record, in whole lines.
  const std::vector<std::string> records = lines(read("m.jsonl"));
  EXPECT_NE(errors[0].find(fmt::format("after step {} of 1000000", records.size())),
            std::string::npos);
  for (const std::string& record : records) EXPECT_TRUE(nlohmann::json::accept(record));
}

INSTANTIATE_TEST_SUITE_P(Backends, InterruptTest,
                         testing::Values("train", "launch -n 2 -- train",
                                         "train --set communication.backend=single"));

}  // namespace
}  // namespace ppfsdp::cli
