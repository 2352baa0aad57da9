#include "backends/start/launcher.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <charconv>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace ppfsdp::start {
namespace {

constexpr int kMaxPort = 65535;
/// Slurm numbers its special steps (batch, interactive, extern) from here to 2^32.
constexpr int64_t kFirstSpecialStep = 0xfffffff0;

/// The variables as one launcher sets them; errors say whose they are.
class Variables {
 public:
  Variables(const Environment& environment, const char* launcher)
      : environment_(environment), launcher_(launcher) {}

  /// nullptr when it is not set.
  const std::string* find(const char* name) const {
    const auto found = environment_.find(name);
    return found == environment_.end() || found->second.empty() ? nullptr : &found->second;
  }
  bool has(const char* name) const { return find(name) != nullptr; }
  bool is(const char* name, std::string_view value) const {
    const std::string* text = find(name);
    return text != nullptr && *text == value;
  }

  const std::string& text(const char* name, const char* meaning) const {
    const std::string* value = find(name);
    TORCH_CHECK(value != nullptr, "environment variable ", name, " is not set; it is ", meaning,
                ", as ", launcher_, " sets it");
    return *value;
  }

  int64_t integer(const char* name, int64_t low, int64_t high, const char* meaning) const {
    const std::string& value = text(name, meaning);
    const std::optional<int64_t> number = parse_integer(value, low, high);
    TORCH_CHECK(number, "environment variable ", name, " must be an integer in [", low, ", ", high,
                "] (", meaning, "), got '", value, "'");
    return *number;
  }

  /// integer() where the variable is set, else `otherwise`.
  int integer_or(const char* name, int64_t low, int64_t high, const char* meaning,
                 int otherwise) const {
    return has(name) ? static_cast<int>(integer(name, low, high, meaning)) : otherwise;
  }

  /// The first of two names that is set; the first if neither is.
  const char* either(const char* first, const char* second) const {
    return !has(first) && has(second) ? second : first;
  }

 private:
  const Environment& environment_;
  const char* launcher_;
};

constexpr const char* kAddressMeaning = "the host name or address of rank 0's machine";
constexpr const char* kPortMeaning = "a free port of rank 0's machine";

// ---- Slurm -------------------------------------------------------------------------------------

/// A rank that srun started, as opposed to a script or shell that has the variables too.
bool is_slurm_task(const Variables& variables) {
  if (!variables.has("SLURM_PROCID")) return false;
  // A batch script is task 0 of a step without a number.
  const std::string* step = variables.find(variables.either("SLURM_STEP_ID", "SLURM_STEPID"));
  if (step == nullptr || !parse_integer(*step, 0, kFirstSpecialStep - 1)) return false;
  // srun --pty bash.
  const bool one = variables.is(variables.either("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "1");
  return !(one && variables.has("SLURM_PTY_PORT"));
}

struct TaskCounts {
  int64_t nodes = 0;
  int64_t tasks = 0;    ///< of all nodes
  int64_t on_node = 0;  ///< of the node asked for
};

/// Reads "4(x2),3": 4 tasks on each of two nodes and 3 on the third.
std::optional<TaskCounts> parse_task_counts(std::string_view text, int64_t node) {
  TaskCounts counts;
  while (true) {
    const std::string_view item = text.substr(0, text.find(','));
    std::optional<int64_t> tasks, repeats = 1;
    const size_t open = item.find("(x");
    if (open == std::string_view::npos) {
      tasks = parse_integer(item, 1, kMaxWorldSize);
    } else {
      if (item.back() != ')') return std::nullopt;
      tasks = parse_integer(item.substr(0, open), 1, kMaxWorldSize);
      repeats = parse_integer(item.substr(open + 2, item.size() - open - 3), 1, kMaxWorldSize);
    }
    if (!tasks || !repeats) return std::nullopt;
    if (counts.nodes <= node && node < counts.nodes + *repeats) counts.on_node = *tasks;
    counts.nodes += *repeats;
    counts.tasks += *tasks * *repeats;
    if (item.size() == text.size()) return counts;
    text.remove_prefix(item.size() + 1);
  }
}

Launched read_slurm(const Environment& environment) {
  const Variables variables(environment, "srun");
  Launched launched;
  launched.launcher = "Slurm";
  const char* world_name = variables.either("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS");
  launched.world_size = static_cast<int>(
      variables.integer(world_name, 1, kMaxWorldSize, "the number of tasks of the step"));
  launched.rank = static_cast<int>(
      variables.integer("SLURM_PROCID", 0, launched.world_size - 1, "this task's rank"));

  const char* counts_name = variables.either("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE");
  const std::string& counts_text =
      variables.text(counts_name, "the number of tasks on each node, such as '4(x2),3'");
  const int64_t node =
      variables.integer("SLURM_NODEID", 0, kMaxWorldSize, "this node's index in the step");
  const std::optional<TaskCounts> counts = parse_task_counts(counts_text, node);
  TORCH_CHECK(counts, "environment variable ", counts_name,
              " must be the number of tasks on each node, such as '4(x2),3', got '", counts_text,
              "'");
  TORCH_CHECK(node < counts->nodes, "environment variable SLURM_NODEID must be below ",
              counts->nodes, ", the nodes of ", counts_name, "='", counts_text, "', got '", node,
              "'");
  TORCH_CHECK(counts->tasks == launched.world_size, counts_name, " is '", counts_text, "', ",
              counts->tasks, " tasks together, but ", world_name, " is ", launched.world_size,
              ": they must be of one step");
  launched.local_world_size = static_cast<int>(counts->on_node);
  launched.local_rank = static_cast<int>(variables.integer(
      "SLURM_LOCALID", 0, launched.local_world_size - 1, "this task's index on its node"));

  if (const std::string* address = variables.find("MASTER_ADDR")) {
    launched.master_addr = *address;
  } else {
    const char* hosts_name = variables.either("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST");
    launched.master_addr =
        first_host(variables.text(hosts_name, "the hosts of the step"), hosts_name);
  }
  if (variables.has("MASTER_PORT")) {
    launched.master_port =
        static_cast<int>(variables.integer("MASTER_PORT", 1, kMaxPort, kPortMeaning));
  } else {
    constexpr int64_t kMost = std::numeric_limits<uint32_t>::max();
    const char* step_name = variables.either("SLURM_STEP_ID", "SLURM_STEPID");
    const char* job_name = variables.either("SLURM_JOB_ID", "SLURM_JOBID");
    launched.master_port = slurm_port(variables.integer(job_name, 0, kMost, "the job's number"),
                                      variables.integer(step_name, 0, kMost, "the step's number"));
  }
  return launched;
}

// ---- torchrun, and whoever sets its variables --------------------------------------------------

/// RANK and WORLD_SIZE must be Slurm's where each task of a step is to be a rank. Where a task is
/// some other launcher's, which starts ranks of its own, their number is a multiple of the tasks'.
void check_against_slurm(const Variables& variables, const Launched& slurm) {
  constexpr const char* kRight =
      "; unset RANK and WORLD_SIZE, which srun's own variables replace, or set both for each task";
  const int64_t world = variables.integer("WORLD_SIZE", 1, kMaxWorldSize, "the number of ranks");
  TORCH_CHECK(world % slurm.world_size == 0, "WORLD_SIZE is ", world,
              ", but srun started a step of ", slurm.world_size, " tasks", kRight);
  if (world != slurm.world_size) return;
  const int64_t rank = variables.integer("RANK", 0, world - 1, "this process's rank");
  TORCH_CHECK(rank == slurm.rank, "RANK is ", rank, ", but SLURM_PROCID is ", slurm.rank,
              " in a step of ", world, " tasks", kRight);
}

/// `defaults`: for what may be missing; of Slurm, or none.
Launched read_torchrun(const Variables& variables, const std::optional<Launched>& defaults) {
  TORCH_CHECK(
      variables.has("WORLD_SIZE"),
      "environment variable WORLD_SIZE is not set, but RANK is: a launcher such as torchrun "
      "sets both, and without one neither may be set");
  TORCH_CHECK(
      variables.has("RANK"),
      "environment variable RANK is not set, but WORLD_SIZE is: a launcher such as torchrun "
      "sets both, and without one neither may be set");
  Launched launched;
  launched.world_size =
      static_cast<int>(variables.integer("WORLD_SIZE", 1, kMaxWorldSize, "the number of ranks"));
  launched.rank = static_cast<int>(
      variables.integer("RANK", 0, launched.world_size - 1, "this process's rank"));
  const bool local = variables.has("LOCAL_RANK") || variables.has("LOCAL_WORLD_SIZE");
  if (local || defaults) {
    constexpr const char* kWorldMeaning = "the number of ranks on this machine";
    constexpr const char* kRankMeaning = "this process's index on this machine";
    launched.local_world_size =
        defaults ? variables.integer_or("LOCAL_WORLD_SIZE", 1, launched.world_size, kWorldMeaning,
                                        defaults->local_world_size)
                 : static_cast<int>(variables.integer("LOCAL_WORLD_SIZE", 1, launched.world_size,
                                                      kWorldMeaning));
    const int64_t last = launched.local_world_size - 1;
    launched.local_rank =
        defaults ? variables.integer_or("LOCAL_RANK", 0, last, kRankMeaning, defaults->local_rank)
                 : static_cast<int>(variables.integer("LOCAL_RANK", 0, last, kRankMeaning));
  }
  if (defaults) {
    launched.launcher = defaults->launcher;
    launched.master_addr = defaults->master_addr;
    launched.master_port = defaults->master_port;
    return launched;
  }
  launched.master_addr = variables.text("MASTER_ADDR", kAddressMeaning);
  launched.master_port =
      static_cast<int>(variables.integer("MASTER_PORT", 1, kMaxPort, kPortMeaning));
  if (variables.has(kLaunchedVariable)) {
    launched.launcher = "ppfsdp launch";
  } else if (variables.has("TORCHELASTIC_RUN_ID")) {
    launched.launcher = "torchrun";
    launched.store_served = variables.is("TORCHELASTIC_USE_AGENT_STORE", "True");
    launched.attempt = variables.integer_or("TORCHELASTIC_RESTART_COUNT", 0,
                                            std::numeric_limits<int>::max(), "its restarts", 0);
  } else if (local) {
    launched.launcher = "torchrun";
  } else {
    launched.launcher = variables.has("KUBERNETES_SERVICE_HOST") || variables.has("PET_NNODES")
                            ? "Kubernetes"
                            : "the environment";
  }
  return launched;
}

/// In a pod of a Kubernetes training job whose processes are for a launcher in the pod to start, a
/// process that nobody launched would take itself for the whole pod.
void refuse_unlaunched_pod(const Variables& variables) {
  constexpr const char* kRight = "; start this pod's processes with ppfsdp launch -- train";
  const std::string* processes = variables.find("PET_NPROC_PER_NODE");
  if (processes != nullptr) {
    const std::optional<int64_t> count = parse_integer(*processes, 0, kMaxWorldSize);
    TORCH_CHECK(!count || *count <= 1, "PET_NPROC_PER_NODE is ", *processes,
                ", but nothing has started as many processes", kRight);
  }
  const std::string* nodes = variables.find("PET_NNODES");
  TORCH_CHECK(variables.has("RANK") || nodes == nullptr || *nodes == "1", "PET_NNODES is ",
              nodes == nullptr ? "" : *nodes, ", but RANK and WORLD_SIZE are not set", kRight);
}

}  // namespace

Environment process_environment() {
  Environment environment;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const char* equals = std::strchr(*entry, '=');
    if (equals == nullptr) continue;
    environment.emplace(std::string(*entry, static_cast<size_t>(equals - *entry)), equals + 1);
  }
  return environment;
}

std::optional<Launched> read_launcher(const Environment& environment) {
  const Variables variables(environment, "torchrun");
  const bool agent = variables.has(kLaunchedVariable) || variables.has("TORCHELASTIC_RUN_ID");
  if (agent) return read_torchrun(variables, std::nullopt);

  std::optional<Launched> slurm;
  if (is_slurm_task(variables)) slurm = read_slurm(environment);
  const bool rank = variables.has("RANK"), world = variables.has("WORLD_SIZE");
  if (slurm && !rank && !world) return slurm;
  if (slurm && !rank) {
    const std::string& size = *variables.find("WORLD_SIZE");
    TORCH_CHECK(size == std::to_string(slurm->world_size), "WORLD_SIZE is ", size,
                ", but srun started a step of ", slurm->world_size,
                " tasks; unset it, or set RANK too for each task");
    return slurm;
  }
  // A step of one task is where somebody sets variables by hand, or starts another launcher.
  if (slurm && (slurm->world_size == 1 || !world)) slurm.reset();
  if (slurm) {
    check_against_slurm(variables, *slurm);
    if (variables.is("WORLD_SIZE", std::to_string(slurm->world_size))) {
      return read_torchrun(variables, slurm);
    }
  }
  if (!variables.has("LOCAL_RANK")) refuse_unlaunched_pod(variables);
  if (!rank && !world) return std::nullopt;
  return read_torchrun(variables, std::nullopt);
}

Launched read_own_launcher() {
  const std::optional<Launched> launched = read_launcher(process_environment());
  TORCH_CHECK(launched,
              "environment variable WORLD_SIZE is not set; it is the number of ranks, as "
              "torchrun sets it");
  return *launched;
}

std::string first_host(std::string_view list, const char* variable) {
  const auto check = [&](bool ok) {
    TORCH_CHECK(ok, "environment variable ", variable,
                " must be a list of hosts such as 'node[01-03,07],gpu5', got '", list, "'");
  };
  std::string host;
  size_t at = 0;
  while (at < list.size() && list[at] != ',') {
    if (list[at] != '[') {
      check(list[at] != ']' && list[at] != ' ');
      host += list[at++];
      continue;
    }
    // The first number of the bracket, its zeros included; the others must be numbers, too.
    const size_t close = list.find(']', at);
    check(close != std::string_view::npos);
    std::string_view inside = list.substr(at + 1, close - at - 1);
    host += inside.substr(0, inside.find_first_of(",-"));
    while (true) {
      const std::string_view item = inside.substr(0, inside.find(','));
      const std::string_view low = item.substr(0, item.find('-'));
      const std::string_view high = low.size() == item.size() ? low : item.substr(low.size() + 1);
      constexpr int64_t kMost = 999'999'999;
      const std::optional<int64_t> from = parse_integer(low, 0, kMost);
      const std::optional<int64_t> to = parse_integer(high, 0, kMost);
      check(from && to && *from <= *to);
      if (item.size() == inside.size()) break;
      inside.remove_prefix(item.size() + 1);
    }
    at = close + 1;
  }
  check(!host.empty());
  return host;
}

int slurm_port(int64_t job, int64_t step) {
  return 20000 + static_cast<int>((16 * job + step) % 10000);
}

std::optional<int64_t> parse_integer(std::string_view text, int64_t low, int64_t high) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  if (value < low || value > high) return std::nullopt;
  return value;
}

}  // namespace ppfsdp::start
