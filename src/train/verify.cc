#include "src/train/verify.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <vector>

#include "src/dtensor/dtensor.h"

namespace ppfsdp::train {
namespace {

at::Tensor in_full(const at::Tensor& tensor) {
  return dtensor::is_dtensor(tensor) ? dtensor::full_tensor(tensor) : tensor;
}

}  // namespace

Verifier::Verifier(const Config& config, const DataLoader& data, comm::Runtime& runtime,
                   VerifyMode mode, std::optional<comm::ReductionOrder> order)
    : runtime_(runtime), trainer_(config, data, runtime) {
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
