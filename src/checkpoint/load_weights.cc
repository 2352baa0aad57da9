#include "src/checkpoint/load_weights.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "src/checkpoint/gather_texts.h"
#include "src/checkpoint/weight_files.h"
#include "src/dtensor/dtensor.h"
#include "src/dtensor/sharding.h"

namespace ppfsdp::checkpoint {
namespace {

using Json = nlohmann::json;

/// A parameter or persistent buffer of the model.
struct Target {
  std::vector<std::string> names;  ///< a tied one has several
  at::Tensor tensor;
};

/// The part of a tensor that a rank holds.
struct Part {
  std::vector<int64_t> begin;
  std::vector<int64_t> sizes;

  bool empty() const { return std::ranges::count(sizes, 0) > 0; }
};

class Targets {
 public:
  explicit Targets(torch::nn::Module& model) { visit(model, ""); }
  std::vector<Target> take() { return std::move(targets_); }

 private:
  // A module that is registered twice is visited twice: its tensors have names for each.
  void visit(torch::nn::Module& module, const std::string& path) {
    const auto* ours = dynamic_cast<const nn::Module*>(&module);
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      add(nn::join_path(path, item.key()), item.value());
    }
    for (const auto& item : module.named_buffers(/*recurse=*/false)) {
      if (ours == nullptr || ours->is_buffer_persistent(item.key())) {
        add(nn::join_path(path, item.key()), item.value());
      }
    }
    for (const auto& child : module.named_children()) {
      visit(*child.value(), nn::join_path(path, child.key()));
    }
  }

  void add(std::string name, const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    const auto [found, is_new] = index_.emplace(tensor.unsafeGetTensorImpl(), targets_.size());
    if (is_new) targets_.push_back({{}, tensor});
    targets_[found->second].names.push_back(std::move(name));
  }

  std::vector<Target> targets_;
  std::unordered_map<const c10::TensorImpl*, size_t> index_;
};

/// What rank `rank` of the world holds of `tensor`; nothing when it is not in the mesh.
std::optional<Part> part_of(const at::Tensor& tensor, int rank) {
  Part part{.begin = std::vector<int64_t>(tensor.dim(), 0), .sizes = tensor.sizes().vec()};
  if (!dtensor::is_dtensor(tensor)) return part;
  const dtensor::Spec& spec = *dtensor::spec_of(tensor);
  const auto found = std::ranges::find(spec.mesh->ranks(), rank);
  if (found == spec.mesh->ranks().end()) return std::nullopt;
  const auto coordinates =
      dtensor::coordinates_of(spec.mesh->shape(), found - spec.mesh->ranks().begin());
  const auto ranges = dtensor::local_ranges(spec.sizes, *spec.mesh, spec.placements, coordinates);
  for (size_t dim = 0; dim < ranges.size(); ++dim) {
    part.begin[dim] = ranges[dim].offset;
    part.sizes[dim] = ranges[dim].length;
  }
  return part;
}

const at::Tensor& local_of(const at::Tensor& tensor) {
  return dtensor::is_dtensor(tensor) ? dtensor::local_of(tensor) : tensor;
}

std::string list(const std::vector<std::string>& texts, const char* separator) {
  constexpr size_t kMost = 8;
  const std::vector<std::string> shown(texts.begin(),
                                       texts.begin() + std::min(kMost, texts.size()));
  std::string text = fmt::format("{}", fmt::join(shown, separator));
  if (texts.size() > kMost) text += fmt::format("{}and {} more", separator, texts.size() - kMost);
  return text;
}

/// What is to be loaded from where; made by a rank that reads.
struct Plan {
  LoadReport report;
  std::vector<std::string> problems;
};

Plan make_plan(const std::vector<Target>& targets, const WeightFiles& files, bool strict) {
  Plan plan;
  std::unordered_set<std::string> known;
  for (const Target& target : targets) {
    const at::ScalarType dtype = target.tensor.scalar_type();
    bool found = false;
    for (const std::string& name : target.names) {
      known.insert(name);
      if (!files.contains(name)) continue;
      const SafetensorsFile& file = files.file(name);
      const at::ScalarType stored = file.dtype(name);
      if (file.sizes(name) != target.tensor.sizes()) {
        plan.problems.push_back(fmt::format(
            "{}: tensor '{}' has sizes [{}], the model's has [{}]", file.path().string(), name,
            fmt::join(file.sizes(name), ", "), fmt::join(target.tensor.sizes(), ", ")));
      } else if (stored != dtype && !(at::isFloatingType(stored) && at::isFloatingType(dtype))) {
        plan.problems.push_back(fmt::format(
            "{}: tensor '{}' is {}, the model's is {}; only floating-point dtypes are converted",
            file.path().string(), name, c10::toString(stored), c10::toString(dtype)));
      } else if (stored != dtype && !found) {
        plan.report.converted.push_back(
            fmt::format("{}: {} to {}", name, c10::toString(stored), c10::toString(dtype)));
      }
      found = true;
    }
    if (!found) plan.report.missing.push_back(target.names[0]);
  }
  for (const std::string& name : files.names()) {
    if (!known.contains(name)) plan.report.unknown.push_back(name);
  }
  if (!strict) return plan;
  if (!plan.report.missing.empty()) {
    plan.problems.push_back(fmt::format("{}: what the model has is missing: {}",
                                        files.path().string(), list(plan.report.missing, ", ")));
  }
  if (!plan.report.unknown.empty()) {
    plan.problems.push_back(fmt::format("{}: the model has nothing called {}",
                                        files.path().string(), list(plan.report.unknown, ", ")));
  }
  return plan;
}

std::vector<std::string> problems_of_model(const std::vector<Target>& targets) {
  std::vector<std::string> problems;
  for (const Target& target : targets) {
    if (target.tensor.is_meta()) {
      problems.push_back(fmt::format(
          "'{}' is on meta; call nn::to_empty(model, device) before the load", target.names[0]));
    }
    if (!dtensor::is_dtensor(target.tensor)) continue;
    for (const dtensor::Placement& placement : dtensor::spec_of(target.tensor)->placements) {
      if (placement.is_partial()) {
        problems.push_back(fmt::format("'{}' is {}; a load takes Shard and Replicate",
                                       target.names[0], placement.str()));
      }
    }
  }
  return problems;
}

std::string to_json(const LoadReport& report) {
  return Json::array({report.missing, report.unknown, report.converted}).dump();
}

LoadReport from_json(const std::string& text) {
  const auto lists = Json::parse(text).get<std::vector<std::vector<std::string>>>();
  return {.missing = lists.at(0), .unknown = lists.at(1), .converted = lists.at(2)};
}

/// Runs `read` and keeps the first error's text; once there is one, does nothing.
void attempt(std::string& fault, const std::function<void()>& read) {
  // A file decides how long its names and shapes are, which the text may repeat.
  constexpr size_t kMost = 4000;
  if (!fault.empty()) return;
  try {
    read();
  } catch (const c10::Error& error) {
    fault = error.what_without_backtrace();
  } catch (const std::exception& error) {
    // Others than the library's own, such as of memory: the other ranks wait all the same.
    fault = error.what();
  }
  if (fault.size() > kMost) fault = fault.substr(0, kMost) + "...";
}

/// The part of `target` as the model has it: in its dtype, on the CPU.
at::Tensor read_part(const Target& target, const Part& part, const WeightFiles& files) {
  at::Tensor values;
  const std::string* first = nullptr;
  for (const std::string& name : target.names) {
    if (!files.contains(name)) continue;
    const SafetensorsFile& file = files.file(name);
    const at::Tensor stored = at::empty(part.sizes, file.dtype(name));
    file.read(name, part.begin, stored);
    if (first == nullptr) {
      values = stored;
      first = &name;
      continue;
    }
    const bool same =
        stored.scalar_type() == values.scalar_type() &&
        at::equal(stored.reshape({-1}).view(at::kByte), values.reshape({-1}).view(at::kByte));
    TORCH_CHECK(same, file.path().string(), ": tensors '", *first, "' and '", name,
                "' differ, but are one (tied) parameter in the model");
  }
  return values.to(target.tensor.scalar_type());
}

}  // namespace

LoadReport load_weights(nn::Module& model, const std::filesystem::path& path,
                        comm::Runtime& runtime, const LoadOptions& options) {
  const at::NoGradGuard no_grad;
  const bool sends = options.reader == WeightsReader::kRankZero;
  const bool reads = !sends || runtime.rank() == 0;
  std::vector<Target> targets = Targets(model).take();

  std::optional<WeightFiles> files;
  Plan plan;
  std::string fault;
  attempt(fault, [&] {
    if (reads) {
      files.emplace(path);
      plan = make_plan(targets, *files, options.strict);
    }
    for (const std::string& problem : problems_of_model(targets)) plan.problems.push_back(problem);
    TORCH_CHECK(plan.problems.empty(), list(plan.problems, "; "));
  });
  agree_on_faults(runtime, fault);
  // Of the readers' reports, which are alike.
  const LoadReport report =
      from_json(gather_texts(runtime, reads ? to_json(plan.report) : std::string())[0]);

  comm::Communicator& world = *runtime.world();
  comm::Stream& stream = runtime.compute_stream();
  for (const Target& target : targets) {
    if (std::ranges::count(report.missing, target.names[0]) > 0) continue;
    const auto options_of_part = target.tensor.options().device(runtime.device());
    for (int rank = 0; rank < runtime.world_size(); ++rank) {
      if (rank != runtime.rank() && !(sends && runtime.rank() == 0)) continue;
      const std::optional<Part> part = part_of(target.tensor, rank);
      if (!part || part->empty()) continue;
      if (rank == runtime.rank()) {
        if (reads) {
          attempt(fault, [&] { local_of(target.tensor).copy_(read_part(target, *part, *files)); });
        } else {
          const at::Tensor values = at::empty(part->sizes, options_of_part);
          world.recv(values, 0, stream);
          stream.synchronize();
          local_of(target.tensor).copy_(values);
        }
      } else {
        // After a fault the others still wait for what they will drop.
        at::Tensor values;
        attempt(fault, [&] {
          values = read_part(target, *part, *files).to(runtime.device()).contiguous();
        });
        if (!values.defined()) values = at::empty(part->sizes, options_of_part);
        world.send(values, rank, stream);
        stream.synchronize();
      }
    }
  }
  agree_on_faults(runtime, fault);
  return report;
}

}  // namespace ppfsdp::checkpoint
