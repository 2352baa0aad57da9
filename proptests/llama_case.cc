#include "proptests/llama_case.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/randint.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <bit>
#include <memory>

#include "src/dtensor/dtensor.h"
#include "src/mesh/device_mesh.h"
#include "src/nn/llama.h"
#include "src/nn/loss.h"
#include "src/optim/adamw.h"
#include "src/optim/clip_grad_norm.h"
#include "src/optim/sgd.h"
#include "src/train/reference.h"

namespace ppfsdp::proptests {
namespace {

nn::Llama make_model(const LlamaCase& c) {
  nn::Llama model(c.model);
  auto generator = at::detail::createCPUGenerator(c.seed);
  const c10::NoGradGuard no_grad;
  for (const auto& item : model->named_parameters()) {
    at::Tensor parameter = item.value();
    parameter.normal_(0.05, 0.3, generator);
    parameter.set_requires_grad(c.frozen.empty() || item.key().find(c.frozen) == std::string::npos);
  }
  return model;
}

// Different for every rank, step and microbatch: equal data would hide a gradient that is not
// reduced.
at::Tensor tokens_of(const LlamaCase& c, int rank, int step, int microbatch) {
  auto generator = at::detail::createCPUGenerator(c.seed + 1 + static_cast<uint64_t>(rank) +
                                                  1000 * static_cast<uint64_t>(step) +
                                                  1000000 * static_cast<uint64_t>(microbatch));
  return at::randint(c.model.vocab_size, {c.batch, c.seq + 1}, generator);
}

at::Tensor loss_of(const LlamaCase& c, nn::Llama& model, int rank, int step, int microbatch) {
  const at::Tensor tokens = tokens_of(c, rank, step, microbatch);
  const at::Tensor logits = model(tokens.narrow(1, 0, c.seq).contiguous());
  return nn::next_token_loss(logits, tokens.narrow(1, 1, c.seq).contiguous()) / c.microbatches;
}

std::unique_ptr<optim::Optimizer> make_optimizer(const LlamaCase& c,
                                                 const std::vector<at::Tensor>& parameters) {
  if (c.adamw) {
    return std::make_unique<optim::AdamW>(parameters,
                                          optim::AdamWOptions{.lr = 0.01, .weight_decay = 0.1});
  }
  return std::make_unique<optim::SGD>(parameters, optim::SGDOptions{.lr = 0.1, .momentum = 0.9});
}

std::vector<at::Tensor> trainable(nn::Llama& model) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& parameter : model->parameters()) {
    if (parameter.requires_grad()) {
      result.push_back(parameter);
    }
  }
  return result;
}

at::Tensor full(const at::Tensor& tensor) {
  return (dtensor::is_dtensor(tensor) ? dtensor::full_tensor(tensor) : tensor).detach().clone();
}

// Clips, records, steps: what both ways of training do after backward.
void finish_step(nn::Llama& model, optim::Optimizer& optimizer, LlamaResult& result,
                 const std::function<double()>& clip) {
  result.norms.push_back(clip());
  result.grads.emplace_back();
  {
    const c10::NoGradGuard no_grad;
    for (const at::Tensor& parameter : model->parameters()) {
      result.grads.back().push_back(parameter.grad().defined() ? full(parameter.grad())
                                                               : at::Tensor());
    }
  }
  optimizer.step();
  optimizer.zero_grad();
  const c10::NoGradGuard no_grad;
  result.parameters.emplace_back();
  for (const at::Tensor& parameter : model->parameters()) {
    result.parameters.back().push_back(full(parameter));
  }
}

std::vector<std::string> names_of(nn::Llama& model) { return model->named_parameters().keys(); }

// at::equal holds 0 and -0 equal and NaN unequal; bits are compared.
std::string compare(const at::Tensor& got, const at::Tensor& want) {
  if (got.defined() != want.defined()) {
    return got.defined() ? "is defined, want undefined" : "is undefined";
  }
  if (!got.defined()) {
    return "";
  }
  if (got.sizes() != want.sizes() || got.scalar_type() != want.scalar_type()) {
    return fmt::format("has {} elements, want {}", got.numel(), want.numel());
  }
  const at::Tensor difference = at::nonzero(
      at::ne(got.contiguous().view(at::kInt), want.contiguous().view(at::kInt)).flatten());
  if (difference.size(0) == 0) {
    return "";
  }
  const int64_t first = difference[0][0].item<int64_t>();
  return fmt::format("{} of {} elements, the first at {}: {:.9g} is not {:.9g}", difference.size(0),
                     got.numel(), first, got.flatten()[first].item<double>(),
                     want.flatten()[first].item<double>());
}

std::string compare(double got, double want) {
  return std::bit_cast<uint64_t>(got) == std::bit_cast<uint64_t>(want)
             ? ""
             : fmt::format("{:.17g} is not {:.17g}", got, want);
}

std::string dtype_name(const std::optional<at::ScalarType>& dtype) {
  return dtype.has_value() ? c10::toString(*dtype) : "unset";
}

}  // namespace

std::string LlamaCase::str() const {
  const std::string flag = std::holds_alternative<std::monostate>(reshard) ? "unset"
                           : std::holds_alternative<int>(reshard)
                               ? std::to_string(std::get<int>(reshard))
                               : (std::get<bool>(reshard) ? "true" : "false");
  return fmt::format(
      "world={} vocab={} dim={} heads={} kv_heads={} layers={} hidden={} tied={} batch={} seq={} "
      "steps={} microbatches={} reshard={} param_dtype={} reduce_dtype={} optimizer={} max_norm={} "
      "norm_type={} group_memory={} frozen='{}' seed={} schedule={} schedule_seed={} order={}",
      world, model.vocab_size, model.dim, model.n_heads, model.kv_heads(), model.n_layers,
      model.hidden_dim, model.tied_output, batch, seq, steps, microbatches, flag,
      dtype_name(policy.param_dtype), dtype_name(policy.reduce_dtype), adamw ? "adamw" : "sgd",
      max_norm, norm_type, group_memory, frozen, seed,
      mesh.schedule == sim::Schedule::kRandom ? "random" : "round_robin", mesh.seed,
      comm::to_string(mesh.order));
}

LlamaResult train_sharded(const LlamaCase& c, comm::Runtime& runtime) {
  nn::Llama model = make_model(c);
  const fsdp::FullyShardOptions options{.mesh = mesh::DeviceMesh::create(runtime, {c.world}),
                                        .reshard_after_forward = c.reshard,
                                        .mp_policy = c.policy};
  for (nn::LlamaBlock& block : model->blocks()) {
    fsdp::fully_shard(*block, options)
        .set_allocate_memory_from_process_group_for_comm(c.group_memory);
  }
  fsdp::FSDPModule sharded = fsdp::fully_shard(*model, options);
  sharded.set_allocate_memory_from_process_group_for_comm(c.group_memory);
  const std::vector<at::Tensor> parameters = trainable(model);
  const auto optimizer = make_optimizer(c, parameters);
  LlamaResult result;
  result.names = names_of(model);
  for (int step = 0; step < c.steps; ++step) {
    result.losses.emplace_back();
    for (int microbatch = 0; microbatch < c.microbatches; ++microbatch) {
      sharded.set_requires_gradient_sync(microbatch == c.microbatches - 1);
      const at::Tensor loss = loss_of(c, model, runtime.rank(), step, microbatch);
      loss.backward();
      result.losses.back().push_back(loss.item<double>());
    }
    finish_step(model, *optimizer, result, [&] {
      return optim::clip_grad_norm_(parameters, c.max_norm, c.norm_type).item<double>();
    });
  }
  return result;
}

std::vector<LlamaResult> train_reference(const LlamaCase& c) {
  nn::Llama model = make_model(c);
  std::vector<nn::Module*> groups;
  for (nn::LlamaBlock& block : model->blocks()) {
    groups.push_back(block.get());
  }
  groups.push_back(model.get());
  train::ReferenceTrainer trainer(groups, {.world = c.world,
                                           .order = c.mesh.order,
                                           .param_dtype = c.policy.param_dtype,
                                           .reduce_dtype = c.policy.reduce_dtype});
  const auto optimizer = make_optimizer(c, trainer.parameters());
  LlamaResult shared;
  shared.names = names_of(model);
  std::vector<std::vector<std::vector<double>>> losses;  // [step][rank][microbatch]
  for (int step = 0; step < c.steps; ++step) {
    losses.push_back(trainer.backward(c.microbatches, [&](int rank, int microbatch) {
      return loss_of(c, model, rank, step, microbatch);
    }));
    finish_step(model, *optimizer, shared,
                [&] { return trainer.clip_grad_norm_(c.max_norm, c.norm_type); });
  }
  std::vector<LlamaResult> results(c.world, shared);
  for (int rank = 0; rank < c.world; ++rank) {
    for (int step = 0; step < c.steps; ++step) {
      results[rank].losses.push_back(losses[step][rank]);
    }
  }
  return results;
}

std::string first_difference(const LlamaResult& got, const LlamaResult& want) {
  for (size_t step = 0; step < want.norms.size(); ++step) {
    for (size_t i = 0; i < want.losses[step].size(); ++i) {
      if (const auto text = compare(got.losses[step][i], want.losses[step][i]); !text.empty()) {
        return fmt::format("step {} loss of microbatch {}: {}", step, i, text);
      }
    }
    if (const auto text = compare(got.norms[step], want.norms[step]); !text.empty()) {
      return fmt::format("step {} gradient norm: {}", step, text);
    }
    for (size_t i = 0; i < want.names.size(); ++i) {
      if (const auto text = compare(got.grads[step][i], want.grads[step][i]); !text.empty()) {
        return fmt::format("step {} grad {}: {}", step, want.names[i], text);
      }
    }
    for (size_t i = 0; i < want.names.size(); ++i) {
      const auto text = compare(got.parameters[step][i], want.parameters[step][i]);
      if (!text.empty()) {
        return fmt::format("step {} parameter {}: {}", step, want.names[i], text);
      }
    }
  }
  return "";
}

}  // namespace ppfsdp::proptests
