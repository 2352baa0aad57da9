#include "golden/compare.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace ppfsdp::golden {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Collects differences; `first` is told once.
class Comparison {
 public:
  explicit Comparison(Difference& result) : result_(result) {}

  void note(const std::string& text) {
    result_.bitwise = false;
    if (result_.first.empty()) result_.first = text;
  }

  /// Returns |a - b| / |b|; 0 for equal bits.
  double number(const std::string& what, double run, double recorded) {
    if (std::memcmp(&run, &recorded, sizeof run) == 0) return 0;
    note(fmt::format("{}: {} instead of {}", what, run, recorded));
    const double difference = std::abs(run - recorded);
    const double relative = difference == 0 ? 0 : difference / std::abs(recorded);
    return std::isnan(relative) ? kInfinity : relative;
  }

  /// Returns the differences as float64, flat; nothing for equal bits.
  at::Tensor tensor(const std::string& what, const at::Tensor& run, const at::Tensor& recorded) {
    TORCH_CHECK(run.sizes() == recorded.sizes() && run.scalar_type() == recorded.scalar_type(),
                what, ": ", run.scalar_type(), " ", run.sizes(), " instead of ",
                recorded.scalar_type(), " ", recorded.sizes());
    const at::Tensor a = run.contiguous(), b = recorded.contiguous();
    if (a.numel() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0) {
      return {};
    }
    const at::Tensor wide_a = a.flatten().to(at::kDouble), wide_b = b.flatten().to(at::kDouble);
    at::Tensor difference = (wide_a - wide_b).abs();
    // NaN beside NaN, and an infinity beside itself, are no difference in value.
    difference.masked_fill_(
        (wide_a == wide_b).logical_or(wide_a.isnan().logical_and(wide_b.isnan())), 0.0);
    difference.nan_to_num_(kInfinity, kInfinity);
    const int64_t worst = difference.argmax().item<int64_t>();
    note(fmt::format("{}: element {} is {} instead of {}", what, worst,
                     wide_a[worst].item<double>(), wide_b[worst].item<double>()));
    return difference;
  }

 private:
  Difference& result_;
};

const at::Tensor& find(const TensorMap& map, const std::string& name, const char* what) {
  const auto found = map.find(name);
  TORCH_CHECK(found != map.end(), "the run has no ", what, " of '", name, "'");
  return found->second;
}

double unit_roundoff(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBFloat16:
      return 0x1p-8;
    case at::kHalf:
      return 0x1p-11;
    default:
      return 0x1p-24;
  }
}

}  // namespace

Difference compare(const Outputs& run, const Outputs& recorded) {
  at::NoGradGuard no_grad;
  Difference result;
  Comparison comparison(result);
  TORCH_CHECK(run.steps.size() == recorded.steps.size(), "the run has ", run.steps.size(),
              " steps instead of ", recorded.steps.size());
  for (size_t step = 0; step < run.steps.size(); ++step) {
    const ExpectedStep &ours = run.steps[step], &theirs = recorded.steps[step];
    TORCH_CHECK(ours.loss_per_rank.size() == theirs.loss_per_rank.size() &&
                    ours.grad_norm.has_value() == theirs.grad_norm.has_value(),
                "step ", step, " has other ranks or norms than the recording");
    for (size_t rank = 0; rank < ours.loss_per_rank.size(); ++rank) {
      result.loss_rel = std::max(
          result.loss_rel, comparison.number(fmt::format("step {}, rank {}: loss", step, rank),
                                             ours.loss_per_rank[rank], theirs.loss_per_rank[rank]));
    }
    result.loss_rel =
        std::max(result.loss_rel,
                 comparison.number(fmt::format("step {}: loss", step), ours.loss, theirs.loss));
    if (ours.grad_norm) {
      result.grad_norm_rel = std::max(result.grad_norm_rel,
                                      comparison.number(fmt::format("step {}: gradient norm", step),
                                                        *ours.grad_norm, *theirs.grad_norm));
    }
    const auto grads = recorded.grads.find(static_cast<int64_t>(step));
    if (grads == recorded.grads.end()) continue;
    const auto run_grads = run.grads.find(static_cast<int64_t>(step));
    TORCH_CHECK(run_grads != run.grads.end(), "the run has no gradients of step ", step);
    for (const auto& [name, grad] : grads->second) {
      if (grad.numel() == 0) continue;
      result.grad_scale = std::max(result.grad_scale, grad.abs().max().item<double>());
      const at::Tensor difference =
          comparison.tensor(fmt::format("step {}: gradient of '{}'", step, name),
                            find(run_grads->second, name, "gradient"), grad);
      if (difference.defined()) {
        result.grad_abs = std::max(result.grad_abs, difference.max().item<double>());
      }
    }
  }
  double square_sum = 0;
  int64_t count = 0;
  for (const auto& [name, value] : recorded.final) {
    count += value.numel();
    const at::Tensor difference =
        comparison.tensor(fmt::format("after the last step: parameter '{}'", name),
                          find(run.final, name, "parameter"), value);
    if (!difference.defined()) continue;
    result.param_abs = std::max(result.param_abs, difference.max().item<double>());
    square_sum += difference.square().sum().item<double>();
  }
  if (count > 0) result.param_rms = std::sqrt(square_sum / static_cast<double>(count));
  return result;
}

namespace {

/// The relative difference e of the gradients.
double gradient_error(const Case& config) {
  const at::ScalarType compute = config.param_dtype.value_or(at::kFloat);
  const double u = unit_roundoff(at::kFloat), v = unit_roundoff(compute);
  const double r = unit_roundoff(config.reduce_dtype.value_or(compute));
  const auto n = static_cast<double>(
      std::max({config.vocab, config.dim, config.hidden, config.batch * config.seq}));
  const auto d = static_cast<double>(2 * (9 * config.layers + 2));
  const double products = v > u ? 2 * std::sqrt(d * std::sqrt(n) * u * v) : std::sqrt(d * n) * u;
  return 4 * (products + std::sqrt(static_cast<double>(config.world)) * r);
}

}  // namespace

Tolerance tolerance(const Case& config, const Difference& difference) {
  const double e = gradient_error(config);
  const auto steps = static_cast<double>(config.steps);
  const double grad_abs = 8 * e * steps * difference.grad_scale;
  Tolerance result{.loss_rel = 8 * e * steps,
                   .grad_norm_rel = 8 * e * steps,
                   .grad_abs = grad_abs,
                   .param_abs = 2 * config.lr * steps,
                   .param_rms = config.lr * std::sqrt(8 * e) * steps};
  if (config.optimizer == "sgd") {
    result.param_abs = result.param_rms = config.lr / (1 - 0.9) * grad_abs * steps;
  }
  return result;
}

bool within(const Difference& difference, const Tolerance& tolerance) {
  return difference.loss_rel <= tolerance.loss_rel &&
         difference.grad_norm_rel <= tolerance.grad_norm_rel &&
         difference.grad_abs <= tolerance.grad_abs && difference.param_abs <= tolerance.param_abs &&
         difference.param_rms <= tolerance.param_rms;
}

}  // namespace ppfsdp::golden
