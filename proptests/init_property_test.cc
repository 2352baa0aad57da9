// Random initial values of a sharded model are those of one device, bit for bit, from whatever
// generator, and the generator ends in the same state: whatever the mesh, placements, sizes,
// dtypes, functions and the order in which ranks run.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/rand_like.h>
#include <ATen/ops/randn_like.h>
#include <ATen/ops/zeros.h>
#include <c10/util/accumulate.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <torch/nn/init.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "fmt/format.h"
#include "fmt/ranges.h"
#include "sim/mesh/world.h"
#include "src/dtensor/dtensor.h"
#include "src/fsdp/fully_shard.h"
#include "src/nn/embedding.h"
#include "src/nn/init.h"
#include "src/nn/linear.h"
#include "src/nn/rms_norm.h"
#include "src/nn/to_empty.h"

namespace ppfsdp::proptests {
namespace {

using dtensor::Placement;
using dtensor::Placements;
using Sizes = std::vector<int64_t>;
using Generator = std::optional<at::Generator>;

int64_t draw(int64_t low, int64_t high) { return *rc::gen::inRange<int64_t>(low, high + 1); }

template <typename T>
const T& choice(const std::vector<T>& all) {
  return all[static_cast<size_t>(draw(0, static_cast<int64_t>(all.size()) - 1))];
}

struct Function {
  const char* name;
  int64_t least_ndim;
  bool takes_generator;
  /// Gives the tensor its values; may return others, made from it.
  std::function<at::Tensor(at::Tensor tensor, const Generator& generator)> run;
};

const std::vector<Function>& functions() {
  namespace init = torch::nn::init;
  static const auto* all = new std::vector<Function>{
      {"normal_", 0, true,
       [](at::Tensor t, const Generator& g) { return t.normal_(0.5, 0.02, g); }},
      {"uniform_", 0, true, [](at::Tensor t, const Generator& g) { return t.uniform_(-1, 3, g); }},
      {"bernoulli_", 0, true, [](at::Tensor t, const Generator& g) { return t.bernoulli_(.3, g); }},
      {"bernoulli_ by tensor", 0, true,
       [](at::Tensor t, const Generator& g) { return t.bernoulli_(at::full({}, 0.7f), g); }},
      {"exponential_", 0, true,
       [](at::Tensor t, const Generator& g) { return t.exponential_(2, g); }},
      {"log_normal_", 0, true,
       [](at::Tensor t, const Generator& g) { return t.log_normal_(0, 1, g); }},
      {"random_", 0, true, [](at::Tensor t, const Generator& g) { return t.random_(3, 99, g); }},
      {"rand_like", 0, true,
       [](const at::Tensor& t, const Generator& g) {
         return at::rand_like(t, g, {}, std::nullopt);
       }},
      {"randn_like", 0, true,
       [](const at::Tensor& t, const Generator& g) {
         return at::randn_like(t, g, {}, std::nullopt);
       }},
      {"transposed normal_", 2, true,
       [](at::Tensor t, const Generator& g) {
         t.transpose(0, 1).normal_(0, 1, g);
         return t;
       }},
      {"nn::trunc_normal_", 0, false,
       [](at::Tensor t, const Generator&) {
         nn::trunc_normal_(t, 0.1, 0.5, -1, 0.9);
         return t;
       }},
      {"dropout", 0, false,
       [](const at::Tensor& t, const Generator&) {
         return at::dropout(at::ones_like(t), 0.25, true);
       }},
      {"init::normal_", 0, false,
       [](const at::Tensor& t, const Generator&) { return init::normal_(t, 0, 2); }},
      {"init::uniform_", 0, false,
       [](const at::Tensor& t, const Generator&) { return init::uniform_(t, 0, 2); }},
      {"init::kaiming_uniform_", 2, false,
       [](const at::Tensor& t, const Generator&) {
         return init::kaiming_uniform_(t, std::sqrt(5.0));
       }},
      {"init::kaiming_normal_", 2, false,
       [](const at::Tensor& t, const Generator&) {
         return init::kaiming_normal_(t, 0, torch::kFanOut, torch::kReLU);
       }},
      {"init::xavier_uniform_", 2, false,
       [](const at::Tensor& t, const Generator&) { return init::xavier_uniform_(t, 0.7); }},
      {"init::xavier_normal_", 2, false,
       [](const at::Tensor& t, const Generator&) { return init::xavier_normal_(t); }},
  };
  return *all;
}

struct TensorCase {
  size_t function = 0;
  Sizes sizes;
  at::ScalarType dtype = at::kFloat;
  Placements placements;
};

struct ListCase {
  Sizes mesh;
  uint64_t seed = 0;
  uint64_t schedule = 0;
  /// Functions that take one get an explicit generator.
  bool explicit_generator = false;
  std::vector<TensorCase> tensors;

  int64_t world() const {
    int64_t product = 1;
    for (const int64_t size : mesh) {
      product *= size;
    }
    return product;
  }
  std::string str() const {
    std::string text =
        fmt::format("mesh [{}], seed {}, schedule {}, {} generator", fmt::join(mesh, ", "), seed,
                    schedule, explicit_generator ? "explicit" : "default");
    for (const TensorCase& tensor : tensors) {
      text += fmt::format("; {} of [{}] {} {}", functions()[tensor.function].name,
                          fmt::join(tensor.sizes, ", "), toString(tensor.dtype),
                          to_string(tensor.placements));
    }
    return text;
  }
};

Sizes draw_mesh() {
  const int64_t first = draw(1, 16);
  if (draw(0, 1) == 0) {
    return {first};
  }
  return {first, draw(1, 16 / first)};
}

Placements draw_placements(const Sizes& mesh, int64_t ndim) {
  Placements placements;
  for (size_t i = 0; i < mesh.size(); ++i) {
    const int64_t dim = draw(-1, ndim - 1);
    placements.push_back(dim < 0 ? Placement::replicate() : Placement::shard(dim));
  }
  if (placements.size() == 2 && placements[0].is_shard() && placements[0] == placements[1] &&
      draw(0, 1) == 0) {
    // As FSDP over tensor parallelism.
    placements[0] = Placement::strided_shard(placements[0].dim(), mesh[1]);
  }
  return placements;
}

/// Sizes of some thousand elements at most, a few of a hundred thousand: more than are drawn at
/// once.
Sizes draw_sizes(int64_t least_ndim) {
  if (draw(0, 7) == 0) {
    return {draw(1, 400), draw(1, 400)};
  }
  Sizes sizes;
  for (int64_t ndim = draw(least_ndim, 3); ndim > 0; --ndim) {
    sizes.push_back(draw(0, 19) == 0 ? 0 : draw(1, 19));
  }
  return sizes;
}

ListCase draw_list() {
  ListCase drawn;
  drawn.mesh = draw_mesh();
  drawn.seed = static_cast<uint64_t>(draw(0, 1000000));
  drawn.schedule = static_cast<uint64_t>(draw(0, 1000000));
  drawn.explicit_generator = draw(0, 1) == 0;
  for (int64_t count = draw(1, 6); count > 0; --count) {
    TensorCase tensor;
    tensor.function = static_cast<size_t>(draw(0, static_cast<int64_t>(functions().size()) - 1));
    const int64_t least_ndim = functions()[tensor.function].least_ndim;
    // LibTorch takes fans of two dims alone, for it looks at element [0][0] of more, and a fan of 0
    // gives bounds without end.
    const auto fits = [&] {
      return least_ndim < 2 || functions()[tensor.function].takes_generator ||
             (tensor.sizes.size() == 2 && c10::multiply_integers(tensor.sizes) > 0);
    };
    do {
      tensor.sizes = draw_sizes(least_ndim);
    } while (!fits());
    tensor.dtype =
        choice(std::vector<at::ScalarType>{at::kFloat, at::kDouble, at::kBFloat16, at::kHalf});
    tensor.placements = draw_placements(drawn.mesh, static_cast<int64_t>(tensor.sizes.size()));
    drawn.tensors.push_back(std::move(tensor));
  }
  return drawn;
}

/// Equal bytes, and sizes and dtype.
bool same(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) {
    return false;
  }
  const at::Tensor x = a.contiguous();
  const at::Tensor y = b.contiguous();
  // memcmp takes no null pointer, not even for nothing.
  return x.numel() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

/// The values that the functions give to `tensors`, each after the other.
std::vector<at::Tensor> run(const ListCase& drawn, const std::vector<at::Tensor>& tensors,
                            const at::Generator& generator) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> values;
  for (size_t k = 0; k < tensors.size(); ++k) {
    const Function& function = functions()[drawn.tensors[k].function];
    values.push_back(function.run(tensors[k], drawn.explicit_generator && function.takes_generator
                                                  ? Generator(generator)
                                                  : Generator()));
  }
  return values;
}

const at::Tensor default_state() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

// It fails for values that depend on the sharding, for shards or calls that get the same values,
// replicas that differ, a bound from a shard's fan-in, and a generator that is left elsewhere.
TEST(InitProperty, sharded_lists_equal_one_devices) {
  int several = 0, uneven = 0, empty_shards = 0, skipping = 0, cases = 0;
  std::set<size_t> used;
  const bool held = rc::check("a sharded list's random values are one device's", [&] {
    const ListCase drawn = draw_list();
    RC_LOG() << "replay: " << drawn.str() << "\n";
    at::manual_seed(drawn.seed);
    std::vector<at::Tensor> plain;
    for (const TensorCase& tensor : drawn.tensors) {
      plain.push_back(at::zeros(tensor.sizes, tensor.dtype).requires_grad_());
    }
    const at::Generator wanted_from = at::detail::createCPUGenerator(drawn.seed + 1);
    const std::vector<at::Tensor> wanted = run(drawn, plain, wanted_from);
    const at::Tensor wanted_state = default_state();

    at::manual_seed(drawn.seed);
    const sim::WorldOptions options = {.seed = drawn.schedule, .schedule = sim::Schedule::kRandom};
    sim::run_world(static_cast<int>(drawn.world()), options, [&](comm::Runtime& runtime) {
      const auto mesh = mesh::DeviceMesh::create(runtime, drawn.mesh);
      std::vector<at::Tensor> sharded;
      for (const TensorCase& tensor : drawn.tensors) {
        sharded.push_back(dtensor::distribute_tensor(
            at::zeros(tensor.sizes, tensor.dtype).requires_grad_(), mesh, tensor.placements));
      }
      const at::Generator got_from = at::detail::createCPUGenerator(drawn.seed + 1);
      const std::vector<at::Tensor> got = run(drawn, sharded, got_from);
      for (size_t k = 0; k < got.size(); ++k) {
        const at::NoGradGuard no_grad;
        if (!same(dtensor::full_tensor(got[k]), wanted[k])) {
          throw std::runtime_error(fmt::format("tensor {} differs on rank {}", k, runtime.rank()));
        }
      }
      if (!at::equal(got_from.get_state(), wanted_from.get_state())) {
        throw std::runtime_error("the explicit generator is in another state");
      }
      if (!at::equal(runtime.default_generator().get_state(), wanted_state)) {
        throw std::runtime_error("the default generator is in another state");
      }
    });
    ++cases;
    several += drawn.world() > 1;
    for (const TensorCase& tensor : drawn.tensors) {
      used.insert(tensor.function);
      for (size_t i = 0; i < drawn.mesh.size(); ++i) {
        if (tensor.placements[i].is_shard()) {
          const int64_t size = tensor.sizes[tensor.placements[i].dim()];
          uneven += size % drawn.mesh[i] != 0;
          empty_shards += size > 0 && size < drawn.mesh[i];
          // More than is drawn at once.
          skipping += drawn.mesh[i] > 1 && c10::multiply_integers(tensor.sizes) > 40000;
        }
      }
    }
  });
  EXPECT_TRUE(held);
  // The cases must have been worth drawing.
  EXPECT_GT(several, cases / 2);
  EXPECT_GT(uneven, cases / 4);
  EXPECT_GT(empty_shards, cases / 10);
  EXPECT_GT(skipping, cases / 100);
  EXPECT_EQ(used.size(), functions().size());
}

/// A layer drawn for a random model.
struct LayerCase {
  int kind = 0;  ///< Linear, Linear without bias, Embedding, RMSNorm
  int64_t in = 1;
  int64_t out = 1;
  int init = 0;
  bool own_group = false;
};

struct ModelCase {
  int64_t world = 1;
  uint64_t seed = 0;
  at::ScalarType dtype = at::kFloat;
  std::vector<LayerCase> layers;

  std::string str() const {
    std::string text = fmt::format("world {}, seed {}, {}", world, seed, toString(dtype));
    for (const LayerCase& layer : layers) {
      text += fmt::format("; kind {} [{}, {}] init {}{}", layer.kind, layer.in, layer.out,
                          layer.init, layer.own_group ? " sharded" : "");
    }
    return text;
  }
};

ModelCase draw_model() {
  ModelCase drawn;
  drawn.world = draw(1, 16);
  drawn.seed = static_cast<uint64_t>(draw(0, 1000000));
  drawn.dtype = choice(std::vector<at::ScalarType>{at::kFloat, at::kBFloat16, at::kDouble});
  for (int64_t count = draw(1, 6); count > 0; --count) {
    drawn.layers.push_back({static_cast<int>(draw(0, 3)), draw(1, 40), draw(1, 40),
                            static_cast<int>(draw(0, 3)), draw(0, 1) == 0});
  }
  return drawn;
}

class ModelImpl : public nn::Module {
 public:
  ModelImpl(const ModelCase& drawn, c10::Device device) {
    const auto options = c10::TensorOptions(device).dtype(drawn.dtype);
    for (size_t k = 0; k < drawn.layers.size(); ++k) {
      const LayerCase& layer = drawn.layers[k];
      const nn::Initializer init = std::vector<nn::Initializer>{
          nn::kaiming_uniform(), nn::normal(0, 0.02), nn::trunc_normal(0, 0.5, -1, 1),
          nn::xavier_normal()}[static_cast<size_t>(layer.init)];
      std::shared_ptr<nn::Module> module;
      if (layer.kind <= 1) {
        module = std::make_shared<nn::LinearImpl>(
            layer.in, layer.out,
            nn::LinearImpl::Options{.bias = layer.kind == 0, .init = init, .tensor = options});
      } else if (layer.kind == 2) {
        module = std::make_shared<nn::EmbeddingImpl>(
            layer.in, layer.out, nn::EmbeddingImpl::Options{.init = init, .tensor = options});
      } else {
        module = std::make_shared<nn::RMSNormImpl>(layer.in, 1e-5, options);
      }
      layers.push_back(register_module("layer" + std::to_string(k), module));
    }
  }
  void reset_parameters() override {}

  std::vector<std::shared_ptr<nn::Module>> layers;
};

// The torchtrain flow: built on meta, sharded, given memory, reset. A module that is skipped, reset
// twice or in another order, or whose shards are reset as if they were whole, differs.
TEST(InitProperty, models_from_meta_equal_models_built_plainly) {
  int uneven = 0, cases = 0;
  const bool held = rc::check("a sharded model from meta starts as a plain one", [&] {
    const ModelCase drawn = draw_model();
    RC_LOG() << "replay: " << drawn.str() << "\n";
    at::manual_seed(drawn.seed);
    const ModelImpl plain(drawn, c10::kCPU);
    const at::Tensor wanted_state = default_state();
    at::manual_seed(drawn.seed);
    sim::run_world(static_cast<int>(drawn.world), {}, [&](comm::Runtime& runtime) {
      const auto mesh = mesh::DeviceMesh::create(runtime, {drawn.world});
      ModelImpl model(drawn, c10::kMeta);
      for (size_t k = 0; k < drawn.layers.size(); ++k) {
        if (drawn.layers[k].own_group) {
          fsdp::fully_shard(*model.layers[k], {.mesh = mesh});
        }
      }
      fsdp::fully_shard(model, {.mesh = mesh});
      nn::to_empty(model, c10::kCPU);
      nn::reset_all_parameters(model);
      const auto wanted = plain.named_parameters();
      const auto got = model.named_parameters();
      if (got.size() != wanted.size()) {
        throw std::runtime_error("parameters are missing");
      }
      const at::NoGradGuard no_grad;
      for (const auto& item : wanted) {
        if (!same(dtensor::full_tensor(got[item.key()]), item.value())) {
          throw std::runtime_error(
              fmt::format("{} differs on rank {}", item.key(), runtime.rank()));
        }
      }
      if (!at::equal(runtime.default_generator().get_state(), wanted_state)) {
        throw std::runtime_error("the generator is in another state");
      }
    });
    ++cases;
    uneven += drawn.layers.front().out % drawn.world != 0;
  });
  EXPECT_TRUE(held);
  EXPECT_GT(uneven, cases / 3);
}

}  // namespace
}  // namespace ppfsdp::proptests
