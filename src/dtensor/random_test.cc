// Random ops as a user meets them: creations, dropout, probabilities, torch::nn::init unmodified,
// generators of one's own and of the rank, errors, and values by element index.
#include "src/dtensor/random.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ThreadLocalState.h>
#include <gtest/gtest.h>
#include <torch/nn/init.h>

#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "src/dtensor/dtensor.h"
#include "src/dtensor/testing.h"

namespace ppfsdp::dtensor {
namespace {

using testing::difference;
using testing::kP;
using testing::kR;
using testing::on_mesh;
using testing::S;
using Sizes = std::vector<int64_t>;
using Make = std::function<at::Tensor(const at::Tensor& x, const at::Generator& generator)>;

at::Generator generator(uint64_t seed) { return at::detail::createCPUGenerator(seed); }

std::string failure_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

/// Probabilities of these sizes.
at::Tensor probabilities(const Sizes& sizes, at::ScalarType dtype) {
  return testing::normals(sizes, 77).sigmoid().to(dtype);
}

/// make() on DTensors of many placements, and on transposed ones, gives what it gives on the plain
/// tensor, and moves the generator alike.
void expect_like_plain(const at::Tensor& plain, const Make& make) {
  for (const int64_t world : {1, 2, 3, 7}) {
    on_mesh({world}, [&](const mesh::DeviceMeshPtr& mesh) {
      for (const Placement& placement : {S(0), S(1), kR}) {
        for (const bool transposed : {false, true}) {
          const at::Tensor whole = transposed ? plain.t() : plain;
          const at::Tensor parts = distribute_tensor(plain, mesh, {placement});
          const at::Tensor sharded = transposed ? parts.t() : parts;
          const at::Generator wanted_from = generator(world);
          const at::Generator got_from = generator(world);
          const at::Tensor wanted = make(whole, wanted_from);
          const at::Tensor got = make(sharded, got_from);
          EXPECT_EQ(spec_of(got)->placements, spec_of(sharded)->placements);
          EXPECT_EQ(got.strides(), wanted.strides());
          EXPECT_EQ(difference(full_tensor(got), wanted), "") << placement.str();
          EXPECT_TRUE(at::equal(got_from.get_state(), wanted_from.get_state()));
        }
      }
    });
  }
}

TEST(Random, creations_like_another) {
  const at::Tensor plain = at::zeros({21, 5});
  expect_like_plain(plain, [](const at::Tensor& x, const at::Generator& from) {
    return at::rand_like(x, from, {}, std::nullopt);
  });
  expect_like_plain(plain, [](const at::Tensor& x, const at::Generator& from) {
    return at::randn_like(x, from, {}, std::nullopt);
  });
  expect_like_plain(plain, [](const at::Tensor& x, const at::Generator& from) {
    return at::randn_like(x, from, at::TensorOptions().dtype(at::kDouble),
                          at::MemoryFormat::Contiguous);
  });
  expect_like_plain(plain, [](const at::Tensor& x, const at::Generator& from) {
    return at::randint_like(x, 10, from, at::TensorOptions().dtype(at::kLong), std::nullopt);
  });
  expect_like_plain(plain, [](const at::Tensor& x, const at::Generator& from) {
    return at::randint_like(x, -4, 10, from, {}, std::nullopt);
  });
}

TEST(Random, bernoulli_by_number_and_by_probabilities) {
  expect_like_plain(at::zeros({20, 7}), [](const at::Tensor& x, const at::Generator& from) {
    return at::bernoulli(x, 0.3, from);
  });
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    expect_like_plain(
        probabilities({20, 7}, dtype),
        [](const at::Tensor& p, const at::Generator& from) { return at::bernoulli(p, from); });
    // In place, of another dtype, the probabilities a DTensor, a row of it, or plain.
    expect_like_plain(probabilities({20, 7}, dtype),
                      [](const at::Tensor& p, const at::Generator& from) {
                        return at::empty_like(p, at::kInt).bernoulli_(p, from);
                      });
    expect_like_plain(at::zeros({7, 7}), [dtype](const at::Tensor& x, const at::Generator& from) {
      return at::empty_like(x).bernoulli_(probabilities({1, 7}, dtype), from);
    });
    expect_like_plain(at::zeros({6, 6}), [](const at::Tensor& x, const at::Generator& from) {
      return at::empty_like(x).bernoulli_(at::full({}, 0.4, at::kDouble), from);
    });
  }
}

// The rank's own generator is drawn from when none is given; a second call goes on from there.
TEST(Random, without_a_generator_the_ranks_own_is_moved_on) {
  at::manual_seed(123);
  const at::Tensor first = at::empty({37, 3}).normal_();
  const at::Tensor second = at::rand_like(first);
  const at::Tensor third = at::empty({5}).normal_();
  at::manual_seed(123);
  on_mesh({4}, [&](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor x = distribute_tensor(at::zeros({37, 3}), mesh, {S(0)});
    EXPECT_EQ(difference(full_tensor(x.normal_()), first), "");
    EXPECT_EQ(difference(full_tensor(at::rand_like(x)), second), "");
    // Ops of fewer than 16 elements leave the second of two normal values for the next one.
    const at::Tensor few = distribute_tensor(at::zeros({5}), mesh, {S(0)});
    EXPECT_EQ(difference(full_tensor(few.normal_()), third), "");
  });
}

// Replicas are equal and no two shards, nor two calls, the same values: a generator set back for
// each draw would make them so.
TEST(Random, replicas_are_equal_and_shards_are_not) {
  on_mesh({2, 3}, [&](const mesh::DeviceMeshPtr& mesh) {
    const at::Generator from = generator(9);
    const at::Tensor x = distribute_tensor(at::zeros({30, 2}), mesh, {kR, S(0)});
    const at::Tensor first = full_tensor(x.normal_(0, 1, from));
    const at::Tensor again = full_tensor(x.normal_(0, 1, from));
    EXPECT_FALSE(at::equal(first, again));
    EXPECT_FALSE(at::equal(again.narrow(0, 0, 10), again.narrow(0, 10, 10)));
    EXPECT_EQ(difference(again,
                         [&] {
                           const at::Generator other = generator(9);
                           at::empty({30, 2}).normal_(0, 1, other);
                           return at::empty({30, 2}).normal_(0, 1, other);
                         }()),
              "");
  });
}

TEST(Random, dropout_and_its_gradient) {
  using Drop = std::function<at::Tensor(const at::Tensor& x)>;
  const std::vector<Drop> all = {
      [](const at::Tensor& x) { return at::dropout(x, 0.4, true); },
      [](const at::Tensor& x) { return at::dropout(x, 0.4, false); },
      [](const at::Tensor& x) { return at::dropout(x, 1, true); },
      [](const at::Tensor& x) { return at::dropout(x, 0, true); },
      [](const at::Tensor& x) { return at::alpha_dropout(x, 0.3, true); },
      [](const at::Tensor& x) { return at::feature_dropout(x, 0.3, true); },
      [](const at::Tensor& x) { return at::feature_alpha_dropout(x, 0.3, true); },
      [](const at::Tensor& x) { return std::get<0>(at::native_dropout(x, 0.3, true)); },
      [](const at::Tensor& x) { return std::get<0>(at::native_dropout(x, 0.3, false)); },
      [](const at::Tensor& x) { return at::dropout(x.t(), 0.4, true); },
      [](const at::Tensor& x) { return std::get<0>(at::native_dropout(x.t(), 0.3, true)); },
  };
  for (size_t k = 0; k < all.size(); ++k) {
    at::manual_seed(k);
    const at::Tensor plain = testing::normals({19, 6}, 3).requires_grad_();
    const at::Tensor wanted = all[k](plain);
    wanted.pow(2).sum().backward();
    const at::Tensor after = at::rand({4});
    at::manual_seed(k);
    on_mesh({3}, [&](const mesh::DeviceMeshPtr& mesh) {
      for (const Placement& placement : {S(0), S(1), kR}) {
        mesh->runtime().default_generator().set_state(generator(k).get_state());
        const at::Tensor x = distribute_tensor(plain.detach(), mesh, {placement}).requires_grad_();
        const at::Tensor got = all[k](x);
        got.pow(2).sum().backward();
        EXPECT_EQ(difference(full_tensor(got).detach(), wanted.detach()), "") << k;
        EXPECT_EQ(difference(full_tensor(x.grad()), plain.grad()), "") << k;
        EXPECT_EQ(difference(at::rand({4}, mesh->runtime().default_generator()), after), "") << k;
      }
    });
  }
}

TEST(Random, dropout_of_partial_sums_is_that_of_the_sum) {
  at::manual_seed(2);
  const at::Tensor whole = testing::integers({4, 9}, 1);
  const at::Tensor wanted = at::dropout(whole * 2, 0.5, true);
  at::manual_seed(2);
  on_mesh({2}, [&](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor partial = from_local(whole, mesh, {kP});
    EXPECT_EQ(difference(full_tensor(at::dropout(partial, 0.5, true)), wanted), "");
  });
}

// torch::nn::init as it is, on leaves that require grad: bounds come from the global fan-in.
TEST(Random, initialisers_of_libtorch) {
  using Init = std::function<void(at::Tensor)>;
  namespace init = torch::nn::init;
  const std::vector<Init> all = {
      [](at::Tensor t) { init::normal_(t, 1, 2); },
      [](at::Tensor t) { init::uniform_(t, -1, 2); },
      [](at::Tensor t) { init::kaiming_uniform_(t, std::sqrt(5.0)); },
      [](at::Tensor t) { init::kaiming_normal_(t, 0, torch::kFanOut, torch::kReLU); },
      [](at::Tensor t) { init::xavier_uniform_(t, 0.5); },
      [](at::Tensor t) { init::xavier_normal_(t); },
      [](at::Tensor t) { init::constant_(t, 3); },
      [](at::Tensor t) { init::ones_(t); },
      [](at::Tensor t) { init::zeros_(t); },
  };
  for (size_t k = 0; k < all.size(); ++k) {
    at::manual_seed(k);
    at::Tensor wanted = at::zeros({13, 22}).requires_grad_();
    all[k](wanted);
    at::manual_seed(k);
    on_mesh({2, 2}, [&](const mesh::DeviceMeshPtr& mesh) {
      for (const Placements& placements : {Placements{S(0), S(1)}, Placements{kR, S(0)},
                                           Placements{Placement::strided_shard(0, 2), S(0)}}) {
        mesh->runtime().default_generator().set_state(generator(k).get_state());
        const at::Tensor x = distribute_tensor(at::zeros({13, 22}), mesh, placements);
        const at::Tensor leaf = x.requires_grad_();
        all[k](leaf);
        EXPECT_TRUE(leaf.is_leaf() && leaf.requires_grad());
        EXPECT_EQ(difference(full_tensor(leaf.detach()), wanted.detach()), "") << k;
      }
    });
  }
}

TEST(Random, draws_on_meta_draw_nothing) {
  on_mesh({2}, [&](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor x =
        from_local(at::empty({2, 3}, at::TensorOptions(at::kMeta)), mesh, {S(0)}, Sizes{4, 3});
    const at::Tensor before = mesh->runtime().default_generator().get_state();
    x.normal_();
    EXPECT_TRUE(at::equal(mesh->runtime().default_generator().get_state(), before));
  });
}

TEST(Random, errors) {
  on_mesh({2}, [&](const mesh::DeviceMeshPtr& mesh) {
    const auto expect = [](const char* what, const std::function<void()>& body) {
      const std::string failure = failure_of(body);
      EXPECT_NE(failure.find(what), std::string::npos) << what << " is not in: " << failure;
    };
    const at::Tensor x = distribute_tensor(at::zeros({4, 3}), mesh, {S(0)});
    const at::Tensor partial = from_local(at::zeros({4, 3}), mesh, {kP});
    expect("redistribute it to Replicate() or Shard(dim) first", [&] { partial.normal_(); });
    expect("redistribute it to Replicate() or Shard(dim) first",
           [&] { partial.bernoulli_(at::full({3}, 0.5)); });
    expect("in [0, 1]", [&] { x.bernoulli_(at::full({3}, 1.5)); });
    expect("in [0, 1]", [&] { x.bernoulli_(at::full({3}, NAN)); });
    expect("floating point", [&] { x.bernoulli_(at::ones({3}, at::kLong)); });
    expect("writes to the plain tensor", [&] { at::zeros({4, 3}).bernoulli_(x); });
    expect("is expanded", [&] { x.narrow(1, 0, 1).expand({4, 3}).normal_(); });
    expect("less than", [&] { x.random_(5, 5); });
    // It looks at element [0][0], which one rank has; nn/init.h has functions that do not.
    const at::Tensor kernels = distribute_tensor(at::zeros({4, 3, 2}), mesh, {S(0)});
    expect("cannot keep Shard(0)", [&] { torch::nn::init::xavier_normal_(kernels); });
    IndexedRandomGuard indexed(1);
    expect("no values by element index", [&] { x.cauchy_(); });
  });
}

/// Some draws by index; whole tensors.
std::vector<at::Tensor> draws_by_index(const mesh::DeviceMeshPtr& mesh,
                                       const Placements& placements, uint64_t first_draw = 0) {
  std::vector<at::Tensor> drawn;
  const auto zeros = [&](at::ScalarType dtype) {
    return distribute_tensor(at::zeros({9, 14}, dtype), mesh, placements);
  };
  IndexedRandomGuard indexed(5, first_draw);
  drawn.push_back(zeros(at::kFloat).normal_(1, 2));
  drawn.push_back(zeros(at::kBFloat16).uniform_(-1, 1));
  drawn.push_back(zeros(at::kInt).random_(3, 11));
  drawn.push_back(zeros(at::kLong).random_(3, std::optional<int64_t>()));
  drawn.push_back(zeros(at::kBool).random_());
  drawn.push_back(zeros(at::kDouble).exponential_());
  drawn.push_back(zeros(at::kFloat).bernoulli_(0.3));
  drawn.push_back(zeros(at::kFloat).bernoulli_(at::full({14}, 0.3)));
  drawn.push_back(at::randn_like(zeros(at::kFloat)));
  drawn.push_back(at::rand_like(zeros(at::kFloat)));
  drawn.push_back(at::randint_like(zeros(at::kFloat), 2, 7));
  drawn.push_back(at::dropout(zeros(at::kFloat) + 1, 0.5, true));
  EXPECT_EQ(indexed.next_draw(), first_draw + drawn.size());
  for (at::Tensor& tensor : drawn) {
    tensor = full_tensor(tensor);
  }
  return drawn;
}

// The values of a draw by index depend on nothing but the seed, the op's number and the index; the
// generator rests.
TEST(Random, draws_by_index_are_the_same_on_every_mesh) {
  std::vector<at::Tensor> wanted;
  on_mesh({1}, [&](const mesh::DeviceMeshPtr& mesh) { wanted = draws_by_index(mesh, {kR}); });
  for (const Placements& placements : {Placements{S(0), S(1)}, Placements{S(1), kR},
                                       Placements{Placement::strided_shard(1, 3), S(1)}}) {
    on_mesh({2, 3}, [&](const mesh::DeviceMeshPtr& mesh) {
      const at::Tensor before = mesh->runtime().default_generator().get_state();
      const std::vector<at::Tensor> got = draws_by_index(mesh, placements);
      for (size_t k = 0; k < got.size(); ++k) {
        EXPECT_EQ(difference(got[k], wanted[k]), "") << k;
      }
      EXPECT_TRUE(at::equal(mesh->runtime().default_generator().get_state(), before));
      EXPECT_FALSE(at::equal(draws_by_index(mesh, placements, 1).front(), wanted.front()));
    });
  }
}

// A guard inside another stands in for it, and the outer one goes on where it was.
TEST(Random, guards_nest) {
  on_mesh({2}, [&](const mesh::DeviceMeshPtr& mesh) {
    const auto draw = [&] {
      return full_tensor(distribute_tensor(at::zeros({6}), mesh, {S(0)}).normal_());
    };
    IndexedRandomGuard outer(1);
    const at::Tensor first = draw();
    {
      IndexedRandomGuard inner(1);
      EXPECT_EQ(difference(draw(), first), "");
      EXPECT_EQ(outer.next_draw(), 1u);
    }
    const at::Tensor second = draw();
    EXPECT_FALSE(at::equal(second, first));
    IndexedRandomGuard later(1, 1);
    EXPECT_EQ(difference(draw(), second), "");
  });
}

// Backward of a GPU's graph runs on a thread of LibTorch's, which recomputes there what activation
// checkpointing dropped: with this thread's state, as a closure that a stream runs later.
TEST(Random, guards_reach_the_threads_of_backward) {
  on_mesh({1}, [&](const mesh::DeviceMeshPtr& mesh) {
    const auto draw = [&] {
      return full_tensor(distribute_tensor(at::zeros({6}), mesh, {S(0)}).normal_());
    };
    at::Tensor first, second;
    {
      IndexedRandomGuard indexed(1);
      first = draw(), second = draw();
    }
    std::optional<at::ThreadLocalState> state;
    {
      IndexedRandomGuard indexed(1);
      EXPECT_EQ(difference(draw(), first), "");
      state.emplace();
      std::thread([&] {
        const at::ThreadLocalStateGuard as_the_engine_does(*state);
        EXPECT_EQ(difference(draw(), second), "");
      }).join();
      EXPECT_EQ(indexed.next_draw(), 2u);
    }
    // What is still to run with that state draws on, though the guard is gone.
    const at::ThreadLocalStateGuard later(*state);
    EXPECT_FALSE(at::equal(draw(), second));
  });
}

}  // namespace
}  // namespace ppfsdp::dtensor
