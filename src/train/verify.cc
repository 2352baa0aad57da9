#include "src/train/verify.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <string>
#include <vector>

#include "src/dtensor/dtensor.h"
#include "src/train/config_error.h"

namespace ppfsdp::train {
namespace {

at::Tensor in_full(const at::Tensor& tensor) {
  return (dtensor::is_dtensor(tensor) ? dtensor::full_tensor(tensor) : tensor).to(at::kCPU);
}

/// The runtime, if what it runs on can be verified.
comm::Runtime& checked(const Config& config, VerifyMode mode, comm::Runtime& runtime) {
  const std::string refusal = refuse_verify(config, mode, runtime.device());
  if (!refusal.empty()) throw ConfigError(refusal);
  return runtime;
}

}  // namespace

std::string refuse_verify(const Config& config, VerifyMode mode, c10::Device device) {
  if (device.is_cpu()) return "";
  if (mode == VerifyMode::kExact) {
    return fmt::format(
        "verify on {} is by --tolerance: the reference runs on the CPU, which adds in another "
        "order",
        device.str());
  }
  if (config.model.weights.empty()) {
    return fmt::format(
        "verify on {} needs model.weights: the values that it draws to begin with are not those of "
        "the reference, which runs on the CPU",
        device.str());
  }
  return "";
}

Verifier::Verifier(const Config& config, const DataLoader& data, comm::Runtime& runtime,
                   VerifyMode mode, std::optional<comm::ReductionOrder> order)
    : runtime_(runtime), trainer_(config, data, checked(config, mode, runtime)) {
  if (runtime.rank() != 0) return;
  ComparedParameters compared;
  for (const auto& entry : trainer_.model()->named_parameters()) {
    compared.names.push_back(entry.key());
    compared.sharded.push_back(entry.value());
  }
  expectation_ =
      mode == VerifyMode::kExact
          ? make_exact_expectation(config, data, order.value_or(runtime.reduction_order()),
                                   std::move(compared))
          : make_tolerance_expectation(config, data, std::move(compared));
}

std::optional<StepVerdict> Verifier::step() {
  const StepResult result = trainer_.step(next_step_++);
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients, parameters;
  for (const auto& entry : trainer_.model()->named_parameters()) {
    const at::Tensor& parameter = entry.value();
    TORCH_CHECK(parameter.grad().defined(), "verify: ", entry.key(), " has no gradient");
    gradients.push_back(in_full(parameter.grad()));
    parameters.push_back(in_full(parameter));
  }
  if (expectation_ == nullptr) return std::nullopt;
  const at::AutoGradMode with_grad(true);
  return expectation_->judge(result, gradients, parameters);
}

}  // namespace ppfsdp::train
