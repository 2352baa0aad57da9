// Random ops: in place, tensors made like another, and dropout. What they draw:
// src/dtensor/random.h.
#include "src/dtensor/random.h"

#include <ATen/ops/aminmax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/lt.h>
#include <ATen/ops/ones_like.h>

#include <limits>
#include <utility>

#include "src/comm/runtime.h"
#include "src/dtensor/random_part.h"
#include "src/dtensor/rules/pointwise.h"

namespace ppfsdp::dtensor {
namespace {

/// What a call draws where it draws by element index (IndexedRandomGuard), from its arguments.
using Describe = std::function<std::optional<Distribution>(const LocalCall& call)>;

at::Generator generator_of(const LocalCall& call, std::optional<size_t> argument) {
  if (argument && call.arg(*argument).isGenerator()) {
    return call.arg(*argument).toGenerator();
  }
  return call.mesh->runtime().default_generator();
}

RandomPart part_of(const Call& call, const Placements& placements, std::vector<int64_t> strides) {
  return {call.schema().name().c_str(), *call.mesh(), placements, call.sizes(), std::move(strides)};
}

/// The integers from `from` to `to` - 1.
Distribution integers(int64_t from, int64_t to) {
  TORCH_CHECK(from < to, "random_: 'from' has to be less than 'to', got from = ", from,
              " and to = ", to);
  return RandomInt{from, static_cast<uint64_t>(to) - static_cast<uint64_t>(from)};
}

/// What random_(from, to) draws, `to` the end of what the dtype holds when it is none.
Distribution integers(const LocalCall& call) {
  const int64_t from = call.arg(1).toInt();
  if (!call.arg(2).isNone()) {
    return integers(from, call.arg(2).toInt());
  }
  if (from == std::numeric_limits<int64_t>::lowest()) {
    return RandomInt{from, 0};
  }
  return RandomInt{
      from, random_range(call.arg(0).toTensor().scalar_type()) - static_cast<uint64_t>(from)};
}

/// An op that fills self and moves nothing.
Rule in_place(const char* name, const Describe& describe) {
  return {
      [name, describe](const Call& call) {
        check_written(call);
        Plan plan;
        const auto part = part_of(call, call.self().spec->placements, call.self().spec->strides);
        const size_t generator = *call.find("generator");
        plan.local = [name, describe, part, generator](const LocalCall& local) {
          const torch::jit::Stack arguments(
              local.stack.end() - static_cast<std::ptrdiff_t>(local.op.schema().arguments().size()),
              local.stack.end());
          const RandomOp op{name,
                            [&](const at::Tensor& tensor, const at::Generator& from) {
                              torch::jit::Stack call = arguments;
                              call.front() = tensor;
                              call[generator] = from;
                              local.op.callBoxed(&call);
                            },
                            describe(local)};
          part.draw(arguments.front().toTensor(), op, generator_of(local, generator),
                    local.mesh->runtime());
          local.finish({arguments.front()});
        };
        return plan;
      },
      /*reads_arguments=*/false};
}

/// For ops that are made of uniform draws here and on the CPU, but not on a GPU.
void check_same_kernel(const char* name, const at::Tensor& local) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      local.is_cpu() || local.is_meta() || IndexedDraw::is_on(), name,
      ": on a GPU ATen has a kernel of its own for it, whose values a DTensor on ", local.device(),
      " cannot draw; draw under an IndexedRandomGuard");
}

/// Fills `self` with draws of 1 with the probabilities `p`, that broadcast to it: LibTorch compares
/// each with a uniform draw in its precision, float for what is less than double.
void draw_by_probabilities(const RandomPart& part, const at::Tensor& self, const at::Tensor& p,
                           const at::Generator& generator, const comm::Runtime& runtime) {
  check_same_kernel("bernoulli of a tensor of probabilities", self);
  TORCH_CHECK(at::isFloatingType(p.scalar_type()), "bernoulli: the probabilities are ",
              p.scalar_type(), ", have to be of a floating point type");
  if (p.numel() > 0 && !p.is_meta()) {
    const auto [least, most] = at::aminmax(p);
    // NaN fails too.
    TORCH_CHECK(least.item<double>() >= 0 && most.item<double>() <= 1,
                "bernoulli: probabilities have to be in [0, 1], these are in [",
                least.item<double>(), ", ", most.item<double>(), "]");
  }
  const at::ScalarType dtype = p.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor uniform = at::empty(self.sizes(), self.options().dtype(dtype));
  part.draw(
      uniform,
      {"bernoulli",
       [](const at::Tensor& tensor, const at::Generator& from) { tensor.uniform_(0, 1, from); },
       Uniform{0, 1}},
      generator, runtime);
  self.copy_(at::lt(uniform, p));
}

/// bernoulli_(p): the probabilities come to where self is.
Plan bernoulli_by_tensor(const Call& call) {
  check_written(call);
  const auto part = part_of(call, call.self().spec->placements, call.self().spec->strides);
  const std::vector<size_t> operands = {0, 1};
  const std::vector<int64_t> sizes = broadcast_sizes(call, operands);
  Plan plan = plan_by_strategies(call, {}, [&](int64_t mesh_dim) {
    return pointwise_strategies(call, operands, sizes, Linear::kNo, mesh_dim);
  });
  const size_t generator = *call.find("generator");
  plan.local = [part, generator](const LocalCall& local) {
    const at::Tensor self = local.arg(0).toTensor();
    draw_by_probabilities(part, self, local.arg(1).toTensor(), generator_of(local, generator),
                          local.mesh->runtime());
    local.finish({self});
  };
  return plan;
}

/// A plan for an op whose result is as empty_like(self, memory_format), with values of its own: no
/// partial sums. Its strides are given, for ATen draws in their order.
Plan like_self(const Call& call, std::optional<at::MemoryFormat> memory_format) {
  const at::Tensor meta = at::empty_strided(call.sizes(), call.self().spec->strides,
                                            at::TensorOptions(at::kMeta).dtype(at::kByte));
  Plan plan;
  plan.results.push_back({without_partials(call.self().spec->placements), call.sizes(), 0,
                          at::empty_like(meta, {}, memory_format).strides().vec()});
  return plan;
}

/// A new tensor like self filled by `fill`, which also gets the call's arguments.
using FillLike =
    std::function<void(const LocalCall& call, const at::Tensor&, const at::Generator&)>;

Rule like(const char* name, const FillLike& fill, const Describe& describe) {
  return {[name, fill, describe](const Call& call) {
    const bool options = call.find("memory_format").has_value();
    const size_t last = call.schema().arguments().size() - 1;
    // bernoulli(p), which has no options, gives a contiguous tensor.
    const std::optional<at::MemoryFormat> memory_format =
        options ? call.arg("memory_format").toOptional<at::MemoryFormat>()
                : at::MemoryFormat::Contiguous;
    Plan plan = like_self(call, memory_format);
    const auto part = part_of(call, plan.results.front().placements, plan.results.front().strides);
    const std::optional<size_t> generator = call.find("generator");
    plan.local = [=](const LocalCall& local) {
      at::TensorOptions how;
      if (options) {
        // dtype, layout, device, pin_memory, memory_format
        how = at::TensorOptions()
                  .dtype(local.arg(last - 4).toOptional<at::ScalarType>())
                  .layout(local.arg(last - 3).toOptional<at::Layout>())
                  .device(local.arg(last - 2).toOptional<at::Device>())
                  .pinned_memory(local.arg(last - 1).toOptional<bool>());
      }
      const at::Tensor result = at::empty_like(local.arg(0).toTensor(), how, memory_format);
      part.draw(
          result,
          {name,
           [&](const at::Tensor& tensor, const at::Generator& from) { fill(local, tensor, from); },
           describe(local)},
          generator_of(local, generator), local.mesh->runtime());
      local.finish({result});
    };
    return plan;
  }};
}

/// bernoulli(self): self has the probabilities.
Plan bernoulli_of_self(const Call& call) {
  Plan plan = like_self(call, at::MemoryFormat::Contiguous);
  plan.inputs = {plan.results.front().placements};
  const auto part = part_of(call, plan.results.front().placements, plan.results.front().strides);
  const size_t generator = *call.find("generator");
  plan.local = [part, generator](const LocalCall& local) {
    const at::Tensor p = local.arg(0).toTensor();
    const at::Tensor result = at::empty_like(p, {}, at::MemoryFormat::Contiguous);
    draw_by_probabilities(part, result, p, generator_of(local, generator), local.mesh->runtime());
    local.finish({result});
  };
  return plan;
}

/// The output and the mask of what was kept.
Plan native_dropout(const Call& call) {
  Plan plan = like_self(call, std::nullopt);
  plan.results.push_back(plan.results.front());
  plan.inputs = {plan.results.front().placements};
  const auto part = part_of(call, plan.results.front().placements, plan.results.front().strides);
  plan.local = [part](const LocalCall& local) {
    const at::Tensor input = local.arg(0).toTensor();
    const double kept = 1 - local.arg(1).toDouble();
    if (!local.arg(2).isNone() && !local.arg(2).toBool()) {
      local.finish({input.clone(), at::ones_like(input, at::kBool)});
      return;
    }
    check_same_kernel("native_dropout", input);
    const at::Tensor mask = at::empty_like(input, at::kBool);
    part.draw(mask,
              {"native_dropout",
               [kept](const at::Tensor& tensor, const at::Generator& from) {
                 tensor.bernoulli_(kept, from);
               },
               Bernoulli{kept}},
              generator_of(local, std::nullopt), local.mesh->runtime());
    // Scaled as LibTorch does it: two roundings.
    local.finish({input.mul(mask).mul_(kept == 0 ? 0. : 1. / kept), mask});
  };
  return plan;
}

std::optional<Distribution> by_generator_only(const LocalCall&) { return std::nullopt; }

const RegisterRule kNormal({"normal_"}, in_place("normal_", [](const LocalCall& call) {
                             return Normal{call.arg(1).toDouble(), call.arg(2).toDouble()};
                           }));
const RegisterRule kUniform({"uniform_"}, in_place("uniform_", [](const LocalCall& call) {
                              return Uniform{call.arg(1).toDouble(), call.arg(2).toDouble()};
                            }));
const RegisterRule kBernoulli({"bernoulli_.float"},
                              in_place("bernoulli_", [](const LocalCall& call) {
                                return Bernoulli{call.arg(1).toDouble()};
                              }));
const RegisterRule kExponential({"exponential_"},
                                in_place("exponential_", [](const LocalCall& call) {
                                  return Exponential{call.arg(1).toDouble()};
                                }));
const RegisterRule kRandom({"random_"},
                           in_place("random_", [](const LocalCall&) { return Random{}; }));
const RegisterRule kRandomTo({"random_.to"}, in_place("random_", [](const LocalCall& call) {
                               return integers(0, call.arg(1).toInt());
                             }));
const RegisterRule kRandomFrom({"random_.from"}, in_place("random_", [](const LocalCall& call) {
                                 return integers(call);
                               }));
const RegisterRule kGeometric({"geometric_"}, in_place("geometric_", by_generator_only));
const RegisterRule kLogNormal({"log_normal_"}, in_place("log_normal_", by_generator_only));
const RegisterRule kCauchy({"cauchy_"}, in_place("cauchy_", by_generator_only));

const RegisterRule kBernoulliByTensor({"bernoulli_.Tensor"},
                                      {bernoulli_by_tensor, /*reads_arguments=*/false});
const RegisterRule kBernoulliOfSelf({"bernoulli"}, {bernoulli_of_self, /*reads_arguments=*/false});
const RegisterRule kBernoulliP(
    {"bernoulli.p"},
    like(
        "bernoulli",
        [](const LocalCall& call, at::Tensor tensor, const at::Generator& generator) {
          tensor.bernoulli_(call.arg(1).toDouble(), generator);
        },
        [](const LocalCall& call) { return Bernoulli{call.arg(1).toDouble()}; }));
const RegisterRule kRandLike({"rand_like", "rand_like.generator"},
                             like(
                                 "rand_like",
                                 [](const LocalCall&, at::Tensor tensor,
                                    const at::Generator& generator) {
                                   tensor.uniform_(0, 1, generator);
                                 },
                                 [](const LocalCall&) { return Uniform{}; }));
const RegisterRule kRandnLike({"randn_like", "randn_like.generator"},
                              like(
                                  "randn_like",
                                  [](const LocalCall&, at::Tensor tensor,
                                     const at::Generator& generator) {
                                    tensor.normal_(0, 1, generator);
                                  },
                                  [](const LocalCall&) { return Normal{}; }));
const RegisterRule kRandintLike(
    {"randint_like", "randint_like.generator"},
    like(
        "randint_like",
        [](const LocalCall& call, at::Tensor tensor, const at::Generator& generator) {
          tensor.random_(0, call.arg(1).toInt(), generator);
        },
        [](const LocalCall& call) { return integers(0, call.arg(1).toInt()); }));
const RegisterRule kRandintLikeLow(
    {"randint_like.low_dtype", "randint_like.low_generator_dtype"},
    like(
        "randint_like",
        [](const LocalCall& call, at::Tensor tensor, const at::Generator& generator) {
          tensor.random_(call.arg(1).toInt(), call.arg(2).toInt(), generator);
        },
        [](const LocalCall& call) { return integers(call.arg(1).toInt(), call.arg(2).toInt()); }));
const RegisterRule kNativeDropout({"native_dropout"}, {native_dropout});
const RegisterRule kNativeDropoutBackward({"native_dropout_backward"}, pointwise());

}  // namespace
}  // namespace ppfsdp::dtensor
