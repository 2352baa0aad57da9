#include "src/nn/module.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

#include <functional>
#include <memory>
#include <string>

namespace ppfsdp::nn {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::string> names_of(const Module::NamedTensors& tensors) { return tensors.keys(); }

class ScaleImpl : public Module {
 public:
  explicit ScaleImpl(double factor, at::Tensor tied = {}) {
    register_parameter("weight", weight, tied.defined() ? tied : at::full({2}, factor));
    register_buffer("table", table, at::ones({2}), /*persistent=*/false);
  }
  at::Tensor forward(const at::Tensor& x) { return x * weight * table; }
  void reset_parameters() override { ++resets; }

  at::Tensor weight, table;
  int resets = 0;
};
PPFSDP_MODULE(Scale);

class PairImpl : public Module {
 public:
  PairImpl() {
    first = register_module("first", std::make_shared<ScaleImpl>(2.0));
    second = register_module("second", std::make_shared<ScaleImpl>(0.0, first->weight));
    register_parameter("bias", bias, at::zeros({2}));
  }
  at::Tensor forward(const at::Tensor& x) { return second(first(x)) + bias; }
  void reset_parameters() override { resets_of_children = first->resets + second->resets; }

  int resets_of_children = -1;
  Scale first = nullptr;
  Scale second = nullptr;
  at::Tensor bias;
};
PPFSDP_MODULE(Pair);

TEST(ModuleSlots, SlotIsTheMemberThatForwardReads) {
  Scale scale(3.0);
  ASSERT_EQ(scale->slot("weight"), &scale->weight);
  EXPECT_EQ(scale->slot("nothing"), nullptr);
  *scale->slot("weight") = at::full({2}, 5.0);
  EXPECT_TRUE(at::equal(scale(at::ones({2})), at::full({2}, 5.0)));
}

TEST(ModuleSlots, ReplacedEntryLeavesTheSlotAlone) {
  Scale scale(3.0);
  const at::Tensor sharded = at::zeros({1}).requires_grad_();
  scale->set_registered_parameter("weight", sharded);
  ASSERT_EQ(scale->parameters().size(), 1u);
  EXPECT_TRUE(scale->parameters()[0].is_same(sharded));
  EXPECT_TRUE(at::equal(scale(at::ones({2})), at::full({2}, 3.0)));
}

TEST(ModuleSlots, RegisteredParameterRequiresGradUnlessToldOtherwise) {
  class Two : public Module {
   public:
    Two() {
      register_parameter("trained", trained, at::zeros({1}));
      register_parameter("frozen", frozen, at::zeros({1}), /*requires_grad=*/false);
    }
    at::Tensor trained, frozen;
  };
  const auto two = std::make_shared<Two>();
  EXPECT_TRUE(two->trained.requires_grad());
  EXPECT_FALSE(two->frozen.requires_grad());
}

TEST(ModuleSlots, BufferIsReplacedInEntryAndSlotEvenOffTheMetaDevice) {
  Scale scale(3.0);
  scale->set_registered_buffer("table", at::empty({2}, at::device(at::kMeta)));
  EXPECT_TRUE(scale->table.is_meta());
  EXPECT_TRUE(scale->buffers()[0].is_meta());
  scale->set_registered_buffer("table", at::full({2}, 7.0));
  EXPECT_TRUE(scale->buffers()[0].is_same(scale->table));
  EXPECT_TRUE(at::equal(scale(at::ones({2})), at::full({2}, 21.0)));
}

TEST(ModuleSlots, PersistenceOfBuffersIsKept) {
  class Buffers : public Module {
   public:
    Buffers() {
      register_buffer("kept", kept, at::zeros({1}));
      register_buffer("table", table, at::zeros({1}), /*persistent=*/false);
    }
    at::Tensor kept, table;
  };
  const auto module = std::make_shared<Buffers>();
  EXPECT_TRUE(module->is_buffer_persistent("kept"));
  EXPECT_FALSE(module->is_buffer_persistent("table"));
  EXPECT_THROW(module->is_buffer_persistent("other"), c10::Error);
}

TEST(ModuleSlots, TiedParameterIsListedOnceAndHasEverySlot) {
  Pair pair;
  EXPECT_THAT(names_of(pair->named_parameters()), ElementsAre("bias", "first.weight"));
  EXPECT_THAT(names_of(pair->named_parameters(true, /*remove_duplicates=*/false)),
              ElementsAre("bias", "first.weight", "second.weight"));
  EXPECT_TRUE(pair->second->named_parameters()["weight"].is_same(pair->first->weight));
  EXPECT_NE(pair->first->slot("weight"), pair->second->slot("weight"));
}

TEST(ModuleSlots, FaultsOfTheCallerAreErrorsAndLeaveTheModuleAsItWas) {
  class Bad : public Module {
   public:
    Bad() { register_parameter("a", a, at::zeros({1})); }
    at::Tensor a, b;
  };
  const auto bad = std::make_shared<Bad>();
  EXPECT_THROW(bad->register_parameter("b", bad->a, at::zeros({1})), c10::Error);
  EXPECT_THROW(bad->register_parameter("a", bad->b, at::zeros({1})), c10::Error);
  EXPECT_THROW(bad->register_parameter("b", bad->b, at::Tensor()), c10::Error);
  EXPECT_THROW(bad->set_registered_parameter("b", at::zeros({1})), c10::Error);
  EXPECT_THROW(bad->set_registered_buffer("a", at::zeros({1})), c10::Error);
  EXPECT_FALSE(bad->b.defined());
  EXPECT_THAT(names_of(bad->named_parameters()), ElementsAre("a"));
}

// Once each, or the random numbers that follow would be others; and children first, as constructors
// do, so that a module may give its children's parameters values of its own.
TEST(ModuleReset, EveryModuleIsResetOnceChildrenFirst) {
  Pair pair;
  pair->register_module("again", pair->first.ptr());
  reset_all_parameters(*pair);
  EXPECT_EQ(pair->first->resets, 1);
  EXPECT_EQ(pair->second->resets, 1);
  EXPECT_EQ(pair->resets_of_children, 2);
}

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

class ForgetfulImpl : public Module {
 public:
  explicit ForgetfulImpl(bool buffer) {
    if (buffer) {
      register_buffer("table", table, at::ones({2}));
    } else {
      register_parameter("weight", table, at::ones({2}));
    }
  }
  at::Tensor table;
};

/// A container of the user's, and what it holds.
class HolderImpl : public Module {
 public:
  explicit HolderImpl(const std::shared_ptr<torch::nn::Module>& held) {
    register_module("middle", std::make_shared<torch::nn::ModuleListImpl>())->push_back(held);
  }
};

// Garbage would train, badly.
TEST(ModuleReset, AModuleThatCannotResetItsOwnIsNamed) {
  for (const bool buffer : {false, true}) {
    HolderImpl holder(std::make_shared<ForgetfulImpl>(buffer));
    const std::string error = error_of([&] { reset_all_parameters(holder); });
    EXPECT_THAT(error, HasSubstr("ForgetfulImpl has parameters or buffers of its own"));
    EXPECT_THAT(error, HasSubstr("while resetting module 'middle.0'"));
  }
  HolderImpl foreign(std::make_shared<torch::nn::LinearImpl>(2, 3));
  EXPECT_THAT(
      error_of([&] { reset_all_parameters(foreign); }),
      HasSubstr("module 'middle.0' is a torch::nn::LinearImpl and has parameters or buffers"));
  HolderImpl nothing(std::make_shared<torch::nn::ReLUImpl>());
  EXPECT_EQ(error_of([&] { reset_all_parameters(nothing); }), "");
  ForgetfulImpl root(false);
  EXPECT_THAT(error_of([&] { reset_all_parameters(root); }),
              HasSubstr("while resetting the root module"));
}

TEST(ModuleVisit, EachOnceWithItsPath) {
  Pair pair;
  pair->register_module("again", pair->first.ptr());
  std::vector<std::string> paths;
  visit_modules(*pair, [&](const std::string& path, torch::nn::Module&) { paths.push_back(path); });
  EXPECT_THAT(paths, ElementsAre("first", "second", ""));
  EXPECT_EQ(join_path("", "a"), "a");
  EXPECT_EQ(join_path("a.b", "c"), "a.b.c");
}

TEST(ModuleExtensions, OnePerKey) {
  struct Note : ModuleExtension {};
  Scale scale(1.0);
  EXPECT_EQ(scale->extension("fsdp"), nullptr);
  const auto note = std::make_shared<Note>();
  scale->set_extension("fsdp", note);
  EXPECT_EQ(scale->extension("fsdp"), note.get());
  EXPECT_EQ(scale->extension("other"), nullptr);
  scale->set_extension("fsdp", nullptr);
  EXPECT_EQ(scale->extension("fsdp"), nullptr);
}

TEST(ForwardHooks, RunInOrderWithPrependFirst) {
  Scale scale(1.0);
  std::string order;
  const auto pre = [&order](const char* mark) {
    return [&order, mark](Module&, const Module::TensorRefs&) { order += mark; };
  };
  scale->register_forward_pre_hook(pre("a"));
  scale->register_forward_pre_hook(pre("b"));
  scale->register_forward_pre_hook(pre("c"), /*prepend=*/true);
  scale->register_forward_hook(pre("1"));
  scale->register_forward_hook(pre("2"), /*prepend=*/true);
  EXPECT_TRUE(scale->has_forward_hooks());
  scale(at::ones({2}));
  EXPECT_EQ(order, "cab21");
}

TEST(ForwardHooks, ReplaceArgumentsAndResultsButNotTheCallersVariable) {
  Scale scale(3.0);
  scale->register_forward_pre_hook([](Module&, const Module::TensorRefs& inputs) {
    ASSERT_EQ(inputs.size(), 1u);
    *inputs[0] = *inputs[0] * 10;
  });
  scale->register_forward_hook([](Module&, const Module::TensorRefs& outputs) {
    ASSERT_EQ(outputs.size(), 1u);
    *outputs[0] = *outputs[0] + 1;
  });
  at::Tensor x = at::ones({2});
  const at::Tensor same = x;
  EXPECT_TRUE(at::equal(scale(x), at::full({2}, 31.0)));
  EXPECT_TRUE(x.is_same(same));
  EXPECT_TRUE(at::equal(scale(at::ones({2})), at::full({2}, 31.0)));
  EXPECT_TRUE(at::equal(scale(std::as_const(x)), at::full({2}, 31.0)));
}

TEST(ForwardHooks, MayRegisterAnotherWhileTheyRun) {
  Scale scale(1.0);
  int late = 0;
  bool first = true;
  scale->register_forward_pre_hook([&](Module& module, const Module::TensorRefs&) {
    if (!std::exchange(first, false)) return;
    for (int i = 0; i < 100; ++i) {
      module.register_forward_pre_hook([&late](Module&, const Module::TensorRefs&) { ++late; });
    }
  });
  scale(at::ones({2}));
  EXPECT_EQ(late, 100);
}

/// A class of the user's that holds tensors.
struct Batch {
  at::Tensor tokens;
  int count = 0;
  void collect_tensors(Module::TensorRefs& out) { nn::collect_tensors(tokens, out); }
};

struct NotCopyable {
  NotCopyable() = default;
  NotCopyable(const NotCopyable&) = delete;
  int calls = 0;
};

class ManyImpl : public Module {
 public:
  std::tuple<at::Tensor, std::optional<at::Tensor>, std::vector<at::Tensor>> forward(
      const std::vector<at::Tensor>& list, std::optional<at::Tensor> maybe, const Batch& batch,
      NotCopyable& counter, int plain = 4) {
    ++counter.calls;
    seen_plain = plain;
    return {batch.tokens, std::move(maybe), list};
  }
  int seen_plain = 0;
};
PPFSDP_MODULE(Many);

class SilentImpl : public Module {
 public:
  void forward(const at::Tensor& x, std::unique_ptr<int> moved) { seen = x, value = *moved; }
  at::Tensor seen;
  int value = 0;
};
PPFSDP_MODULE(Silent);

TEST(ForwardHooks, SeeTensorsInContainersAndPassTheRestThrough) {
  Many many;
  size_t inputs_seen = 0, outputs_seen = 0;
  many->register_forward_pre_hook([&](Module&, const Module::TensorRefs& inputs) {
    inputs_seen = inputs.size();
    for (at::Tensor* input : inputs) *input = *input + 1;
  });
  many->register_forward_hook(
      [&](Module&, const Module::TensorRefs& outputs) { outputs_seen = outputs.size(); });
  const std::vector<at::Tensor> list{at::zeros({1}), at::Tensor(), at::zeros({1})};
  NotCopyable counter;
  const auto [tokens, maybe, returned] =
      many(list, at::zeros({1}), Batch{at::full({1}, 2.0), 1}, counter);
  EXPECT_EQ(inputs_seen, 4u);
  EXPECT_EQ(outputs_seen, 4u);
  EXPECT_EQ(counter.calls, 1);
  EXPECT_EQ(many->seen_plain, 4);
  EXPECT_TRUE(at::equal(tokens, at::full({1}, 3.0)));
  EXPECT_TRUE(at::equal(*maybe, at::ones({1})));
  EXPECT_TRUE(at::equal(returned[2], at::ones({1})));
  EXPECT_TRUE(at::equal(list[2], at::zeros({1})));
}

TEST(ForwardHooks, VoidForwardAndMoveOnlyArguments) {
  Silent silent;
  silent(at::ones({1}), std::make_unique<int>(1));
  EXPECT_EQ(silent->value, 1);
  int after = 0;
  silent->register_forward_hook([&after](Module&, const Module::TensorRefs& outputs) {
    EXPECT_TRUE(outputs.empty());
    ++after;
  });
  silent(at::ones({1}), std::make_unique<int>(2));
  EXPECT_EQ(silent->value, 2);
  EXPECT_EQ(after, 1);
}

// What forward writes into an argument would be lost with the hooks' copy of it: such a forward
// does not compile. Constant references, values, pointers and what holds no tensors are no copies.
TEST(ForwardHooks, RefuseForwardsThatWriteTheirArguments) {
  struct Writer {
    void forward(std::vector<at::Tensor>&, int) {}
    void forward(const at::Tensor&, at::Tensor&) {}
  };
  struct Reader {
    void forward(const std::vector<at::Tensor>&, int&) {}
    void forward(at::Tensor, const at::Tensor&) {}
    void forward(std::vector<at::Tensor>*) {}
  };
  using Tensors = std::vector<at::Tensor>;
  static_assert(internal::writes_arguments<Writer, Tensors&, int>());
  static_assert(internal::writes_arguments<Writer, at::Tensor&, at::Tensor&>());
  static_assert(internal::writes_arguments<Writer, at::Tensor, at::Tensor&>());
  static_assert(!internal::writes_arguments<Reader, Tensors&, int&>());
  static_assert(!internal::writes_arguments<Reader, at::Tensor&, at::Tensor&>());
  static_assert(!internal::writes_arguments<Reader, at::Tensor, const at::Tensor&>());
  static_assert(!internal::writes_arguments<Reader, Tensors*>());
}

class AppendImpl : public Module {
 public:
  void forward(const at::Tensor& x, std::vector<at::Tensor>* out) { out->push_back(x + 1); }
};
PPFSDP_MODULE(Append);

// The way that the refusal recommends must work.
TEST(ForwardHooks, LeaveWhatAPointerPointsTo) {
  Append append;
  append->register_forward_pre_hook([](Module&, const Module::TensorRefs&) {});
  std::vector<at::Tensor> out;
  append(at::zeros({1}), &out);
  ASSERT_EQ(out.size(), 1u);
  EXPECT_EQ(out[0].item<float>(), 1.0f);
}

class ThrowingImpl : public Module {
 public:
  at::Tensor forward(const at::Tensor& x) {
    TORCH_CHECK(!throws, "forward failed");
    return x;
  }
  bool throws = false;
};
PPFSDP_MODULE(Throwing);

// An extension that began something before forward must learn that there is no after.
TEST(ForwardHooks, ErrorHooksRunWhenForwardOrAHookThrows) {
  Throwing module;
  int errors = 0;
  bool hook_throws = false;
  module->register_forward_error_hook([&](Module&) { ++errors; });
  module->register_forward_hook(
      [&](Module&, const Module::TensorRefs&) { TORCH_CHECK(!hook_throws, "hook failed"); });
  module(at::zeros({1}));
  EXPECT_EQ(errors, 0);
  module->throws = true;
  EXPECT_THROW(module(at::zeros({1})), c10::Error);
  EXPECT_EQ(errors, 1);
  module->throws = false;
  hook_throws = true;
  EXPECT_THROW(module(at::zeros({1})), c10::Error);
  EXPECT_EQ(errors, 2);
  EXPECT_THROW(module->register_forward_error_hook(nullptr), c10::Error);
}

TEST(CollectTensors, FindsThemAtAnyDepth) {
  std::map<std::string, std::vector<std::pair<int, std::array<at::Tensor, 2>>>> nested;
  nested["a"].push_back({1, {at::ones({1}), at::ones({2})}});
  nested["b"].push_back({2, {at::ones({3}), at::Tensor()}});
  Module::TensorRefs found;
  collect_tensors(nested, found);
  ASSERT_EQ(found.size(), 3u);
  EXPECT_EQ(found[2]->numel(), 3);
  std::vector<bool> flags(3);
  collect_tensors(flags, found);
  EXPECT_EQ(found.size(), 3u);
}

}  // namespace
}  // namespace ppfsdp::nn
