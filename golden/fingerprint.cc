#include "golden/fingerprint.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/norm.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>
#include <fmt/format.h>

#include <cstdint>

namespace ppfsdp::golden {
namespace {

/// Values from -1 to 1 that no power of two hides.
at::Tensor values(at::IntArrayRef sizes, int64_t salt) {
  const int64_t count = c10::multiply_integers(sizes);
  const at::Tensor counted = at::arange(count).mul_(37).add_(salt).remainder_(97);
  return counted.to(at::kFloat).sub_(48).div_(49).view(sizes);
}

/// FNV-1a.
void hash(uint64_t& state, const at::Tensor& tensor) {
  const at::Tensor whole = tensor.contiguous();
  const auto* bytes = static_cast<const unsigned char*>(whole.const_data_ptr());
  for (size_t i = 0; i < whole.nbytes(); ++i) state = (state ^ bytes[i]) * 0x100000001b3;
}

}  // namespace

std::string kernel_fingerprint() {
  uint64_t state = 0xcbf29ce484222325;
  for (const int64_t n : {7, 12, 32, 33, 100}) {
    const at::Tensor a = values({2 * n, n}, 1), b = values({n, n + 3}, 2);
    hash(state, at::mm(a, b));
    hash(state, at::mm(a.to(at::kBFloat16), b.to(at::kBFloat16)));
    hash(state, at::norm(a));
    hash(state, at::mean(a, /*dim=*/{-1}, /*keepdim=*/false));
    hash(state, at::silu(at::exp(a)));
    const at::Tensor q = values({1, 2, n, 6}, 3);
    hash(state, at::scaled_dot_product_attention(q, q, q, {}, 0.0, /*is_causal=*/true));
  }
  return fmt::format("{:016x}", state);
}

}  // namespace ppfsdp::golden
