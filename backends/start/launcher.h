#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace ppfsdp::start {

/// Environment variables by name. One that is set to nothing counts as not set.
using Environment = std::map<std::string, std::string>;

/// This process's environment.
Environment process_environment();

/// The variable that `ppfsdp launch` sets for its ranks.
inline constexpr const char* kLaunchedVariable = "PPFSDP_LAUNCHED";

/// The most ranks that a launcher may start.
inline constexpr int kMaxWorldSize = 65536;

/// What a launcher told this process about its place in the world.
struct Launched {
  /// Who started it: "torchrun", "ppfsdp launch", "Slurm", "Kubernetes", or "the environment".
  std::string launcher;
  int rank = 0;
  int world_size = 1;
  /// Which of this machine's ranks this one is, and how many there are.
  int local_rank = 0;
  int local_world_size = 1;
  std::string master_addr;
  int master_port = 0;
  /// Whether the launcher itself serves a c10d store at master_addr:master_port (torchrun's agent
  /// does), so that rank 0 must not.
  bool store_served = false;
  /// How often the launcher has started the world anew in that store.
  int attempt = 0;
  bool operator==(const Launched&) const = default;
};

/// Reads the variables of the launcher that started this process; nothing when none did.
///
/// - torchrun and `ppfsdp launch`: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
///   MASTER_PORT; torchrun's TORCHELASTIC_USE_AGENT_STORE and TORCHELASTIC_RESTART_COUNT.
/// - Kubernetes' PyTorchJob with one process a pod, or a script: the same without LOCAL_RANK and
///   LOCAL_WORLD_SIZE, which then are 0 and 1.
/// - Slurm's srun: SLURM_PROCID, SLURM_STEP_NUM_TASKS (or SLURM_NTASKS), SLURM_LOCALID,
///   SLURM_NODEID, SLURM_STEP_TASKS_PER_NODE (or SLURM_TASKS_PER_NODE). The master is MASTER_ADDR,
///   else the first host of SLURM_STEP_NODELIST (or SLURM_JOB_NODELIST); its port MASTER_PORT, else
///   slurm_port() of SLURM_JOB_ID and SLURM_STEP_ID. A batch script, an interactive step and a
///   one-task step with a terminal (srun --pty) are no rank, although they have SLURM_PROCID too.
///
/// torchrun and `ppfsdp launch` may run within a Slurm step; otherwise RANK and WORLD_SIZE must
/// agree with Slurm's variables.
///
/// c10::Error, one line that names the variable, what was got and what would be right: a variable
/// that is missing, is no number, is out of range or contradicts another one.
std::optional<Launched> read_launcher(const Environment& environment);

/// read_launcher of this process's environment; c10::Error, one line, when no launcher started it.
Launched read_own_launcher();

/// The first host of a Slurm host list such as "node[01-03,07],gpu5": "node01". c10::Error names
/// `variable` when the list is malformed.
std::string first_host(std::string_view list, const char* variable);

/// Where rank 0 of a Slurm step listens when MASTER_PORT is not set: 20000 + (16 job + step) mod
/// 10000, so that neither two steps of a job nor jobs of near numbers meet on a shared node, and
/// below the ports that Linux gives to outgoing connections (32768 and up).
int slurm_port(int64_t job, int64_t step);

/// `text` as an integer in [low, high]; nothing if it is none.
std::optional<int64_t> parse_integer(std::string_view text, int64_t low, int64_t high);

}  // namespace ppfsdp::start
