// Rewrites golden/cases: every NAME.json there is run again by the one-process reference, and its
// results and NAME.safetensors replaced. A new case starts as a file that holds only {"case":
// {...}}. `bazel run //golden:update`
// Exit code 2: bad input, of which nothing was rewritten; 1: another failure.
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <vector>

#include "golden/case.h"
#include "golden/fingerprint.h"
#include "golden/train.h"
#include "src/cli/report.h"

namespace ppfsdp::golden {
namespace {

constexpr int kFailed = 1, kBadInput = 2;

struct NamedCase {
  std::filesystem::path json;
  Case config;
};

/// All cases, before any of them is rewritten: a bad one leaves everything as it was.
std::vector<NamedCase> read_cases(int argc, char** argv) {
  TORCH_CHECK(argc == 1, "takes no arguments, got '", argv[1],
              "'; it rewrites every case of golden/cases");
  const char* workspace = std::getenv("BUILD_WORKSPACE_DIRECTORY");
  TORCH_CHECK(workspace != nullptr, "run this as `bazel run //golden:update`");
  const std::filesystem::path folder = std::filesystem::path(workspace) / "golden/cases";
  TORCH_CHECK(std::filesystem::is_directory(folder), folder.string(), ": there is no such folder");
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() == ".json") paths.push_back(entry.path());
  }
  TORCH_CHECK(!paths.empty(), folder.string(), ": holds no NAME.json");
  std::ranges::sort(paths);
  std::vector<NamedCase> cases;
  for (const std::filesystem::path& json : paths) cases.push_back({json, read_case(json)});
  return cases;
}

void rewrite(const std::vector<NamedCase>& cases) {
  for (const auto& [json, config] : cases) {
    Recording recording;
    recording.config = config;
    recording.inputs = make_inputs(recording.config, recording.config.steps);
    recording.outputs =
        train_single(recording.config, recording.inputs, comm::ReductionOrder::kGlooRing);
    recording.kernels = kernel_fingerprint();
    write_recording(recording, json);
    fmt::print("{}\n", json.string());
  }
}

}  // namespace
}  // namespace ppfsdp::golden

int main(int argc, char** argv) {
  int code = ppfsdp::golden::kBadInput;
  try {
    at::set_num_threads(1);
    const auto cases = ppfsdp::golden::read_cases(argc, argv);
    code = ppfsdp::golden::kFailed;
    ppfsdp::golden::rewrite(cases);
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "update: error: {}\n", ppfsdp::cli::one_line(error));
  }
  return code;
}
