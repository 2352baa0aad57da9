#include "backends/start/launcher.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

namespace ppfsdp::start {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// `base` with some variables changed; those of an empty value are not set.
Environment with(Environment base, const Environment& changes) {
  for (const auto& [name, value] : changes) base[name] = value;
  return base;
}

std::string error_of(const Environment& environment) {
  try {
    read_launcher(environment);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

const Environment kTorchrun = {{"RANK", "5"},
                               {"WORLD_SIZE", "8"},
                               {"LOCAL_RANK", "1"},
                               {"LOCAL_WORLD_SIZE", "4"},
                               {"MASTER_ADDR", "node-7"},
                               {"MASTER_PORT", "29501"}};

/// As srun sets them for task 5 of a step of 7: nodes of 4 and 3 tasks.
const Environment kSlurm = {{"SLURM_JOB_ID", "4211"},
                            {"SLURM_STEP_ID", "2"},
                            {"SLURM_PROCID", "5"},
                            {"SLURM_LOCALID", "1"},
                            {"SLURM_NODEID", "1"},
                            {"SLURM_NTASKS", "7"},
                            {"SLURM_STEP_NUM_TASKS", "7"},
                            {"SLURM_STEP_TASKS_PER_NODE", "4,3"},
                            {"SLURM_TASKS_PER_NODE", "4,3"},
                            {"SLURM_STEP_NODELIST", "gpu[07-08]"},
                            {"SLURM_JOB_NODELIST", "gpu[05-08]"}};

// ---- torchrun, ppfsdp launch, Kubernetes
// ---------------------------------------------------------

TEST(Launcher, NobodyLaunchedAPlainProcess) {
  EXPECT_EQ(read_launcher({}), std::nullopt);
  EXPECT_EQ(read_launcher({{"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}, {"RANK", ""}}),
            std::nullopt);
}

TEST(Launcher, TorchrunsVariables) {
  const Launched expected = {.launcher = "torchrun",
                             .rank = 5,
                             .world_size = 8,
                             .local_rank = 1,
                             .local_world_size = 4,
                             .master_addr = "node-7",
                             .master_port = 29501};
  EXPECT_EQ(read_launcher(kTorchrun), expected);
}

// torchrun's agent serves the store that its workers are to meet in: a rank 0 that listened too
// would find the port taken. A restarted world must not read the keys of the one that failed.
TEST(Launcher, TorchrunsAgentServesTheStore) {
  const Environment agent = with(kTorchrun, {{"TORCHELASTIC_RUN_ID", "none"},
                                             {"TORCHELASTIC_RESTART_COUNT", "3"},
                                             {"TORCHELASTIC_USE_AGENT_STORE", "True"}});
  EXPECT_TRUE(read_launcher(agent)->store_served);
  EXPECT_EQ(read_launcher(agent)->attempt, 3);
  EXPECT_FALSE(
      read_launcher(with(agent, {{"TORCHELASTIC_USE_AGENT_STORE", "False"}}))->store_served);
  // Ranks of `ppfsdp launch` under torchrun meet at an address of their own.
  EXPECT_FALSE(read_launcher(with(agent, {{kLaunchedVariable, "1"}}))->store_served);
  EXPECT_THAT(error_of(with(agent, {{"TORCHELASTIC_RESTART_COUNT", "x"}})),
              HasSubstr("TORCHELASTIC_RESTART_COUNT must be an integer"));
}

TEST(Launcher, OneProcessAPodHasNoLocalRank) {
  const Environment pod = with(kTorchrun, {{"LOCAL_RANK", ""},
                                           {"LOCAL_WORLD_SIZE", ""},
                                           {"PET_NNODES", "8"},
                                           {"PET_NODE_RANK", "5"},
                                           {"PET_NPROC_PER_NODE", "auto"}});
  const std::optional<Launched> launched = read_launcher(pod);
  EXPECT_EQ(launched->launcher, "Kubernetes");
  EXPECT_EQ(launched->rank, 5);
  EXPECT_EQ(launched->local_rank, 0);
  EXPECT_EQ(launched->local_world_size, 1);
  EXPECT_EQ(read_launcher(with(pod, {{"PET_NNODES", ""}}))->launcher, "the environment");
  EXPECT_EQ(read_launcher(with(pod, {{"PET_NPROC_PER_NODE", "1"}}))->rank, 5);
}

// The operator's RANK is the pod's: taken for a process's, most ranks would never come, or each pod
// would train for itself.
TEST(Launcher, APodOfSeveralProcessesNeedsALauncher) {
  const Environment pod = with(kTorchrun, {{"LOCAL_RANK", ""},
                                           {"LOCAL_WORLD_SIZE", ""},
                                           {"PET_NNODES", "2"},
                                           {"PET_NPROC_PER_NODE", "4"}});
  EXPECT_EQ(error_of(pod),
            "PET_NPROC_PER_NODE is 4, but nothing has started as many processes; start this pod's "
            "processes with ppfsdp launch -- train");
  EXPECT_EQ(error_of({{"PET_NNODES", "2"}, {"PET_NPROC_PER_NODE", "1"}}),
            "PET_NNODES is 2, but RANK and WORLD_SIZE are not set; start this pod's processes with "
            "ppfsdp launch -- train");
  EXPECT_EQ(read_launcher({{"PET_NNODES", "1"}, {"PET_NPROC_PER_NODE", "1"}}), std::nullopt);
  // What ppfsdp launch starts in the pod.
  EXPECT_EQ(read_launcher(
                with(kTorchrun,
                     {{"PET_NNODES", "2"}, {"PET_NPROC_PER_NODE", "4"}, {kLaunchedVariable, "1"}}))
                ->launcher,
            "ppfsdp launch");
}

TEST(Launcher, NamesAVariableThatIsMissing) {
  for (const char* name :
       {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    EXPECT_THAT(error_of(with(kTorchrun, {{name, ""}})),
                HasSubstr(std::string("environment variable ") + name + " is not set"));
  }
  EXPECT_EQ(error_of(with(kTorchrun, {{"MASTER_ADDR", ""}})),
            "environment variable MASTER_ADDR is not set; it is the host name or address of rank "
            "0's machine, as torchrun sets it");
}

TEST(Launcher, NamesAVariableThatIsWrongAndWhatWouldBeRight) {
  const auto error = [](const char* name, const char* value) {
    return error_of(with(kTorchrun, {{name, value}}));
  };
  EXPECT_EQ(
      error("RANK", "8"),
      "environment variable RANK must be an integer in [0, 7] (this process's rank), got '8'");
  EXPECT_THAT(error("RANK", "-1"), HasSubstr("got '-1'"));
  EXPECT_THAT(error("RANK", "+1"), HasSubstr("got '+1'"));
  EXPECT_THAT(error("RANK", "1x"), HasSubstr("got '1x'"));
  EXPECT_THAT(error("RANK", " 1"), HasSubstr("got ' 1'"));
  EXPECT_THAT(error("RANK", "99999999999999999999"), HasSubstr("RANK must be an integer"));
  EXPECT_THAT(error("WORLD_SIZE", "0"), HasSubstr("WORLD_SIZE must be an integer in [1, 65536]"));
  EXPECT_THAT(error("WORLD_SIZE", "four"), HasSubstr("got 'four'"));
  EXPECT_THAT(error("LOCAL_WORLD_SIZE", "9"),
              HasSubstr("LOCAL_WORLD_SIZE must be an integer in [1, 8]"));
  EXPECT_THAT(error("LOCAL_RANK", "4"), HasSubstr("LOCAL_RANK must be an integer in [0, 3]"));
  EXPECT_THAT(error("MASTER_PORT", "65536"),
              HasSubstr("MASTER_PORT must be an integer in [1, 65535]"));
  EXPECT_THAT(error("MASTER_PORT", "0"), HasSubstr("got '0'"));
}

// ---- Slurm
// ---------------------------------------------------------------------------------------

TEST(Launcher, SrunsVariables) {
  const Launched expected = {.launcher = "Slurm",
                             .rank = 5,
                             .world_size = 7,
                             .local_rank = 1,
                             .local_world_size = 3,
                             .master_addr = "gpu07",
                             .master_port = slurm_port(4211, 2)};
  EXPECT_EQ(read_launcher(kSlurm), expected);
  // What a script may set.
  const Environment own = {{"MASTER_ADDR", "ib-gpu07"}, {"MASTER_PORT", "29500"}};
  EXPECT_EQ(read_launcher(with(kSlurm, own))->master_addr, "ib-gpu07");
  EXPECT_EQ(read_launcher(with(kSlurm, own))->master_port, 29500);
}

// The step's variables count; the job's, which may be larger, stand in for them.
TEST(Launcher, AStepMayBePartOfItsJob) {
  EXPECT_EQ(read_launcher(with(kSlurm, {{"SLURM_NTASKS", "16"}, {"SLURM_TASKS_PER_NODE", "4(x4)"}}))
                ->world_size,
            7);
  const std::optional<Launched> launched =
      read_launcher(with(kSlurm, {{"SLURM_STEP_NUM_TASKS", ""},
                                  {"SLURM_STEP_TASKS_PER_NODE", ""},
                                  {"SLURM_STEP_NODELIST", ""}}));
  EXPECT_EQ(launched->world_size, 7);
  EXPECT_EQ(launched->local_world_size, 3);
  EXPECT_EQ(launched->master_addr, "gpu05");
}

TEST(Launcher, TasksOfEachNode) {
  const auto local_world_size = [](const char* tasks, const char* node, const char* world) {
    return read_launcher(with(kSlurm, {{"SLURM_STEP_TASKS_PER_NODE", tasks},
                                       {"SLURM_NODEID", node},
                                       {"SLURM_STEP_NUM_TASKS", world}}))
        ->local_world_size;
  };
  EXPECT_EQ(local_world_size("7", "0", "7"), 7);
  EXPECT_EQ(local_world_size("4(x2),3", "0", "11"), 4);
  EXPECT_EQ(local_world_size("4(x2),3", "1", "11"), 4);
  EXPECT_EQ(local_world_size("4(x2),3", "2", "11"), 3);
  EXPECT_EQ(local_world_size("2,8(x100),3(x2)", "102", "808"), 3);
  for (const char* wrong : {"4(x2", "4(2)", "x4", "4,,3", "4,", "0", "4(x0)", "4(x2)3"}) {
    EXPECT_EQ(error_of(with(kSlurm, {{"SLURM_STEP_TASKS_PER_NODE", wrong}})),
              std::string("environment variable SLURM_STEP_TASKS_PER_NODE must be the number of "
                          "tasks on each node, such as '4(x2),3', got '") +
                  wrong + "'");
  }
}

TEST(Launcher, FaultsOfSrunsVariablesAreNamed) {
  const auto error = [](const char* name, const char* value) {
    return error_of(with(kSlurm, {{name, value}}));
  };
  EXPECT_EQ(
      error("SLURM_LOCALID", ""),
      "environment variable SLURM_LOCALID is not set; it is this task's index on its node, as "
      "srun sets it");
  EXPECT_THAT(error("SLURM_LOCALID", "3"), HasSubstr("SLURM_LOCALID must be an integer in [0, 2]"));
  EXPECT_THAT(error("SLURM_PROCID", "7"), HasSubstr("SLURM_PROCID must be an integer in [0, 6]"));
  EXPECT_THAT(error("SLURM_NODEID", "2"), HasSubstr("SLURM_NODEID must be below 2"));
  EXPECT_THAT(error("SLURM_NODEID", ""), HasSubstr("SLURM_NODEID is not set"));
  EXPECT_THAT(error("SLURM_STEP_NUM_TASKS", "8"),
              HasSubstr("SLURM_STEP_TASKS_PER_NODE is '4,3', 7 tasks together, but "
                        "SLURM_STEP_NUM_TASKS is 8"));
  EXPECT_THAT(error("SLURM_JOB_ID", ""), HasSubstr("SLURM_JOB_ID is not set"));
  EXPECT_THAT(error_of(with(kSlurm, {{"SLURM_STEP_NODELIST", ""}, {"SLURM_JOB_NODELIST", ""}})),
              HasSubstr("SLURM_STEP_NODELIST is not set"));
  EXPECT_THAT(error("SLURM_STEP_NODELIST", "gpu[07"),
              HasSubstr("SLURM_STEP_NODELIST must be a list of hosts"));
}

// They have SLURM_PROCID=0 and the job's SLURM_NTASKS: taken for a rank, `ppfsdp train` in a batch
// script would wait for others that nobody started.
TEST(Launcher, ABatchScriptOrShellIsNoRank) {
  const Environment batch = with(kSlurm, {{"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}});
  EXPECT_EQ(read_launcher(with(batch, {{"SLURM_STEP_ID", ""}})), std::nullopt);
  EXPECT_EQ(read_launcher(with(batch, {{"SLURM_STEP_ID", "batch"}})), std::nullopt);
  EXPECT_EQ(read_launcher(with(batch, {{"SLURM_STEP_ID", "4294967291"}})), std::nullopt);
  EXPECT_EQ(read_launcher(with(batch, {{"SLURM_STEP_ID", "4294967290"}})), std::nullopt);
  EXPECT_EQ(read_launcher(with(batch, {{"SLURM_PROCID", ""}})), std::nullopt);
  // srun --pty bash; more than one task are ranks, with a terminal or not.
  const Environment one = with(
      batch,
      {{"SLURM_STEP_NUM_TASKS", "1"}, {"SLURM_STEP_TASKS_PER_NODE", "1"}, {"SLURM_NODEID", "0"}});
  EXPECT_EQ(read_launcher(one)->world_size, 1);
  EXPECT_EQ(read_launcher(with(one, {{"SLURM_PTY_PORT", "40000"}})), std::nullopt);
  EXPECT_EQ(read_launcher(with(kSlurm, {{"SLURM_PTY_PORT", "40000"}}))->world_size, 7);
}

TEST(Launcher, AnotherLauncherMayRunInAStep) {
  // srun started two tasks, each a torchrun of four; torchrun numbers nodes as it likes.
  const Environment two = with(kSlurm, {{"SLURM_PROCID", "0"},
                                        {"SLURM_NODEID", "0"},
                                        {"SLURM_LOCALID", "0"},
                                        {"SLURM_STEP_NUM_TASKS", "2"},
                                        {"SLURM_STEP_TASKS_PER_NODE", "1(x2)"}});
  const Environment torchrun = with(with(two, kTorchrun), {{"TORCHELASTIC_RUN_ID", "none"}});
  EXPECT_EQ(read_launcher(torchrun)->rank, 5);
  EXPECT_EQ(read_launcher(torchrun)->launcher, "torchrun");
  // One process a torchrun: as many ranks as tasks, in another order.
  EXPECT_EQ(read_launcher(with(torchrun, {{"WORLD_SIZE", "2"},
                                          {"RANK", "1"},
                                          {"LOCAL_WORLD_SIZE", "1"},
                                          {"LOCAL_RANK", "0"}}))
                ->rank,
            1);
  // A launcher that leaves no mark.
  EXPECT_EQ(read_launcher(with(two, kTorchrun))->rank, 5);
  // Variables by hand in a shell that srun gave.
  EXPECT_EQ(read_launcher(with(with(two, kTorchrun),
                               {{"SLURM_STEP_NUM_TASKS", "1"}, {"SLURM_STEP_TASKS_PER_NODE", "1"}}))
                ->rank,
            5);
}

// Scripts export them from Slurm's, each task its own or, by mistake, all tasks the same.
TEST(Launcher, RankAndWorldSizeMustBeSlurms) {
  const Environment both = with(kSlurm, {{"RANK", "5"}, {"WORLD_SIZE", "7"}});
  EXPECT_EQ(read_launcher(both), read_launcher(kSlurm));
  EXPECT_EQ(read_launcher(with(both, {{"LOCAL_RANK", "0"}}))->local_rank, 0);
  EXPECT_EQ(error_of(with(both, {{"RANK", "0"}})),
            "RANK is 0, but SLURM_PROCID is 5 in a step of 7 tasks; unset RANK and WORLD_SIZE, "
            "which srun's own variables replace, or set both for each task");
  EXPECT_THAT(error_of(with(both, {{"WORLD_SIZE", "8"}})),
              HasSubstr("WORLD_SIZE is 8, but srun started a step of 7 tasks"));
  EXPECT_THAT(error_of(with(both, {{"WORLD_SIZE", "1"}, {"RANK", "0"}})),
              HasSubstr("WORLD_SIZE is 1, but srun started a step of 7 tasks"));
  EXPECT_EQ(read_launcher(with(both, {{"RANK", ""}})), read_launcher(kSlurm));
  EXPECT_THAT(error_of(with(both, {{"RANK", ""}, {"WORLD_SIZE", "8"}})),
              HasSubstr("WORLD_SIZE is 8, but srun started a step of 7 tasks"));
  EXPECT_THAT(error_of(with(both, {{"WORLD_SIZE", ""}})),
              HasSubstr("environment variable WORLD_SIZE is not set, but RANK is"));
}

TEST(HostList, FirstHost) {
  const auto first = [](const char* list) { return first_host(list, "X"); };
  EXPECT_EQ(first("node7"), "node7");
  EXPECT_EQ(first("node[01-03,07],gpu5"), "node01");
  EXPECT_EQ(first("gpu5,node[01-03,07]"), "gpu5");
  EXPECT_EQ(first("node[7,01-03]"), "node7");
  EXPECT_EQ(first("rack[2-3]n[008-016]-ib.cluster"), "rack2n008-ib.cluster");
  EXPECT_EQ(first("node-a[1]"), "node-a1");
  for (const char* wrong :
       {"", ",a", "node[", "node[1", "node[]", "node[1-]", "node[-1]", "node[3-1]", "node[a]",
        "node]1", "node[1[2]]", "node[1,,2]", " node"}) {
    try {
      first(wrong);
      ADD_FAILURE() << "'" << wrong << "' was read";
    } catch (const c10::Error& error) {
      EXPECT_EQ(error.what_without_backtrace(),
                std::string("environment variable X must be a list of hosts such as "
                            "'node[01-03,07],gpu5', got '") +
                    wrong + "'");
    }
  }
}

// All ranks derive it alone, so it is part of the interface; steps and neighbouring jobs must not
// meet each other.
TEST(SlurmPort, IsStatedAndKeepsStepsApart) {
  EXPECT_EQ(slurm_port(0, 0), 20000);
  EXPECT_EQ(slurm_port(4211, 2), 20000 + (16 * 4211 + 2) % 10000);
  for (int64_t job = 0; job < 5000; ++job) {
    ASSERT_GE(slurm_port(job, 3), 20000);
    ASSERT_LT(slurm_port(job, 3), 30000);
    ASSERT_NE(slurm_port(job, 0), slurm_port(job, 1));
    ASSERT_NE(slurm_port(job, 15), slurm_port(job + 1, 0));
  }
}

TEST(ProcessEnvironment, IsThisProcesss) {
  setenv("PPFSDP_LAUNCHER_TEST", "a=b", 1);
  EXPECT_EQ(process_environment().at("PPFSDP_LAUNCHER_TEST"), "a=b");
  unsetenv("PPFSDP_LAUNCHER_TEST");
  EXPECT_EQ(process_environment().count("PPFSDP_LAUNCHER_TEST"), 0u);
}

}  // namespace
}  // namespace ppfsdp::start
