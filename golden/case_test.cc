// Case files that are right, and every way in which they can be wrong.
#include "golden/case.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <string>

#include "golden/train.h"

namespace ppfsdp::golden {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::filesystem::path path_of(const std::string& name) {
  return std::filesystem::path(::testing::TempDir()) / name;
}

std::filesystem::path write(const std::string& text) {
  const std::filesystem::path path = path_of("case.json");
  std::ofstream(path) << text;
  return path;
}

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

std::string error_of(const std::string& text) {
  const std::string error = error_of([&] { read_case(write(text)); });
  EXPECT_THAT(error, HasSubstr("case.json: "));
  return error;
}

Case small() {
  Case c;
  c.vocab = 5, c.dim = 4, c.heads = 2, c.kv_heads = 1, c.layers = 1, c.hidden = 3;
  c.batch = 1, c.seq = 4, c.steps = 2;
  return c;
}

Recording record(const Case& config) {
  Recording recording;
  recording.config = config;
  recording.inputs = make_inputs(config, config.steps);
  recording.outputs = train_single(config, recording.inputs, comm::ReductionOrder::kGlooRing);
  recording.kernels = "some";
  return recording;
}

TEST(ReadCase, MissingFieldsHaveTheirDefaults) {
  const Case c = read_case(write(R"({"case": {"dim": 16, "reshard": 2, "norm_type": Infinity,
                                              "param_dtype": "bfloat16", "frozen": "a Infinity"}})"));
  EXPECT_EQ(c.dim, 16);
  EXPECT_EQ(c.vocab, 128);
  EXPECT_EQ(std::get<int64_t>(c.reshard), 2);
  EXPECT_EQ(c.norm_type, std::numeric_limits<double>::infinity());
  EXPECT_EQ(c.param_dtype, at::kBFloat16);
  EXPECT_FALSE(c.reduce_dtype.has_value());
  EXPECT_EQ(c.frozen, "a Infinity");
}

TEST(ReadCase, FilesThatAreNone) {
  EXPECT_THAT(error_of([] { read_case("/nowhere/a.json"); }),
              HasSubstr("/nowhere/a.json: can't open"));
  EXPECT_THAT(error_of(""), HasSubstr("the file is empty"));
  EXPECT_THAT(error_of(R"({"case": {"dim": 1)"), HasSubstr("not JSON, or cut short"));
  EXPECT_THAT(error_of(R"({"cases": {}})"), HasSubstr("there is no \"case\""));
  EXPECT_THAT(error_of("[]"), HasSubstr("there is no \"case\""));
  EXPECT_THAT(error_of(R"({"case": 3})"), HasSubstr("\"case\" must be an object"));
}

TEST(ReadCase, FieldsThatAreWrong) {
  EXPECT_THAT(error_of(R"({"case": {"dimm": 1}})"), HasSubstr("case.dimm is no field"));
  EXPECT_THAT(error_of(R"({"case": {"dim": "x"}})"),
              HasSubstr(R"(case.dim is "x", must be an integer)"));
  EXPECT_THAT(error_of(R"({"case": {"dim": 1.5}})"), HasSubstr("case.dim is 1.5, must be an int"));
  EXPECT_THAT(error_of(R"({"case": {"tied": 1}})"), HasSubstr("case.tied is 1, must be true or f"));
  EXPECT_THAT(error_of(R"({"case": {"lr": "x"}})"), HasSubstr("case.lr is \"x\", must be a numb"));
  EXPECT_THAT(error_of(R"({"case": {"reshard": "x"}})"),
              HasSubstr("must be true, false or an int"));
  EXPECT_THAT(error_of(R"({"case": {"param_dtype": "int8"}})"),
              HasSubstr("must be \"\", \"bfloat"));
  EXPECT_THAT(error_of(R"({"case": {"frozen": 1}})"), HasSubstr("must be a string"));
  EXPECT_THAT(error_of(R"({"case": {"seed": 9223372036854775808}})"),
              HasSubstr("case.seed is 9223372036854775808, must be below 2^63"));
  EXPECT_THAT(error_of(R"({"case": {"dim": 4611686018427387904}})"),
              HasSubstr("case.dim is 4611686018427387904, must be at most 16777216"));
  EXPECT_THAT(error_of(R"({"case": {"world": 0}})"),
              HasSubstr("case.world is 0, must be positive"));
  EXPECT_THAT(error_of(R"({"case": {"heads": 5}})"),
              HasSubstr("dim 32 is not a multiple of n_hea"));
  EXPECT_THAT(error_of(R"({"case": {"replicate": 2, "world": 4}})"),
              HasSubstr("case.replicate is 2: replication (HSDP) is not supported yet"));
  EXPECT_THAT(error_of(R"({"case": {"reshard": 3, "world": 4}})"),
              HasSubstr("case.reshard is 3, must be true, false or a divisor of world 4"));
  EXPECT_THAT(error_of(R"({"case": {"optimizer": "lion"}})"), HasSubstr("must be \"adamw\" or"));
  EXPECT_THAT(error_of(R"({"case": {"norm_type": 0}})"), HasSubstr("norm_type is 0, must be pos"));
}

TEST(Recording, IsReadAsItWasWritten) {
  Case config = small();
  config.norm_type = std::numeric_limits<double>::infinity();
  config.reduce_dtype = at::kDouble;
  config.reshard = false;
  config.frozen = "wq";
  Recording written = record(config);
  written.outputs.steps[1].loss = written.outputs.steps[1].loss_per_rank[0] = std::nan("");
  const std::filesystem::path json = path_of("whole.json");
  write_recording(written, json);
  const Recording read = read_recording(json);
  EXPECT_EQ(read.name, "whole");
  EXPECT_EQ(read.kernels, "some");
  EXPECT_EQ(read.config.reduce_dtype, at::kDouble);
  EXPECT_EQ(read.config.norm_type, config.norm_type);
  EXPECT_FALSE(std::get<bool>(read.config.reshard));
  ASSERT_EQ(read.outputs.steps.size(), 2u);
  EXPECT_EQ(read.outputs.steps[0].loss_per_rank, written.outputs.steps[0].loss_per_rank);
  EXPECT_TRUE(std::isnan(read.outputs.steps[1].loss));
  EXPECT_EQ(read.outputs.steps[0].grad_norm, written.outputs.steps[0].grad_norm);
  EXPECT_FALSE(read.outputs.grads.at(0).contains("layers.0.attention.wq.weight"));
  for (const auto& [name, value] : written.outputs.final) {
    EXPECT_TRUE(at::equal(read.outputs.final.at(name), value)) << name;
    EXPECT_TRUE(at::equal(read.inputs.init.at(name), written.inputs.init.at(name))) << name;
  }
  EXPECT_TRUE(at::equal(read.inputs.tokens[1], written.inputs.tokens[1]));
}

TEST(Recording, TensorsMustFitTheCase) {
  const std::filesystem::path json = path_of("bad.json");
  const auto error_with = [&](const std::function<void(Recording&)>& change) {
    Recording recording = record(small());
    change(recording);
    write_recording(recording, json);
    return error_of([&] { read_recording(json); });
  };
  EXPECT_EQ(error_with([](Recording&) {}), "no error");
  EXPECT_THAT(error_with([](Recording& r) { r.config.frozen = "weight"; }),
              HasSubstr("bad.json: case.frozen is \"weight\", which leaves no parameter to train"));
  EXPECT_THAT(error_with([](Recording& r) { r.inputs.init.erase("norm.weight"); }),
              HasSubstr("bad.safetensors: there is no tensor 'init/norm.weight'"));
  EXPECT_THAT(error_with([](Recording& r) { r.outputs.grads.erase(1); }),
              HasSubstr("there is no tensor 'grad/1/"));
  EXPECT_THAT(error_with([](Recording& r) { r.outputs.final["norm.weight"] = at::full({3}, 1.0); }),
              HasSubstr("tensor 'final/norm.weight' is Float [3]; the case needs Float [4]"));
  EXPECT_THAT(error_with([](Recording& r) {
                r.inputs.tokens[0] = at::full({1, 2, 1, 4}, 5, at::kLong);
              }),
              HasSubstr("tensor 'tokens/0' holds the token 5; the vocabulary is 0 to 4"));
  EXPECT_THAT(error_with([](Recording& r) { r.outputs.steps.pop_back(); }),
              HasSubstr("\"steps\" must be a list of case.steps = 2 entries"));
  EXPECT_THAT(error_with([](Recording& r) { r.outputs.steps[1].loss_per_rank.pop_back(); }),
              AllOf(HasSubstr("step 1: "), HasSubstr("one number a rank")));
  EXPECT_THAT(error_with([](Recording& r) { r.outputs.steps[0].grad_norm.reset(); }),
              HasSubstr("grad_norm must be a number"));
  EXPECT_EQ(error_with([](Recording&) {}), "no error");
  std::filesystem::remove(tensors_beside(json));
  EXPECT_THAT(error_of([&] { read_recording(json); }), HasSubstr("bad.safetensors: can't open"));
}

TEST(Recording, EveryCutOfTheJsonIsAnError) {
  const std::filesystem::path json = path_of("cut.json");
  write_recording(record(small()), json);
  std::ifstream in(json);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  // Only the closing brace and the newline behind it: shorter, something is missing.
  for (size_t length = 0; length + 2 <= text.size(); length += 7) {
    std::ofstream(json, std::ios::trunc) << text.substr(0, length);
    EXPECT_THAT(error_of([&] { read_recording(json); }), HasSubstr("cut.json: ")) << length;
  }
}

TEST(MakeInputs, DependOnTheSeedAlone) {
  Case config = small();
  const Inputs a = make_inputs(config, 2), b = make_inputs(config, 2);
  config.seed = 8;
  const Inputs c = make_inputs(config, 2);
  EXPECT_TRUE(at::equal(a.tokens[1], b.tokens[1]));
  EXPECT_TRUE(at::equal(a.init.at("output.weight"), b.init.at("output.weight")));
  EXPECT_FALSE(at::equal(a.tokens[1], c.tokens[1]));
  EXPECT_FALSE(at::equal(a.init.at("output.weight"), c.init.at("output.weight")));
  // The labels are the tokens one place on.
  EXPECT_TRUE(at::equal(a.tokens[0].narrow(3, 1, 3), a.labels[0].narrow(3, 0, 3)));
}

}  // namespace
}  // namespace ppfsdp::golden
