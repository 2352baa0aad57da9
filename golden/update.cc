// Rewrites golden/cases: every NAME.json there is run again by the one-process reference, and its
// results and NAME.safetensors replaced. A new case starts as a file that holds only {"case":
// {...}}. `bazel run //golden:update`
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

namespace ppfsdp::golden {
namespace {

void update() {
  const char* workspace = std::getenv("BUILD_WORKSPACE_DIRECTORY");
  TORCH_CHECK(workspace != nullptr, "run this as `bazel run //golden:update`");
  std::vector<std::filesystem::path> cases;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::filesystem::path(workspace) / "golden/cases")) {
    if (entry.path().extension() == ".json") cases.push_back(entry.path());
  }
  std::ranges::sort(cases);
  for (const std::filesystem::path& json : cases) {
    Recording recording;
    recording.config = read_case(json);
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

int main() {
  try {
    at::set_num_threads(1);
    ppfsdp::golden::update();
    return 0;
  } catch (const c10::Error& error) {
    fmt::print(stderr, "update: {}\n", error.what_without_backtrace());
  } catch (const std::exception& error) {
    fmt::print(stderr, "update: {}\n", error.what());
  }
  return 1;
}
